"""What a maintainer asks about the machine: versions, limits, memory, processes, the kernel's OOM killer."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from sky_monarch.launch.process import carrying

__all__ = ["host", "kernel_oom", "processes", "versions"]

_PACKAGES = (
    "fsspec",
    "httpx",
    "numpy",
    "pydantic",
    "s3fs",
    "sky-monarch",
    "torch",
    "torchft",
    "torchft-nightly",
    "typer",
)
_DEVICES = ("/dev/dri", "/dev/infiniband", "/dev/kfd", "/dev/nvidiactl")
_FILES = (
    "/proc/version",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/self/cgroup",
    "/proc/self/limits",
    "/proc/pressure/cpu",
    "/proc/pressure/io",
    "/proc/pressure/memory",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.peak",
    "/sys/fs/cgroup/pids.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.max_usage_in_bytes",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
_FILE_BYTES = 16_384
_OOM = re.compile(r"out of memory|oom[-_]?kill|killed process|oom_reaper|memory cgroup", re.IGNORECASE)
_OOM_LINES = 200
_KMSG_RECORDS = 100_000
_STATUS = (
    "Name",
    "State",
    "PPid",
    "Threads",
    "VmPeak",
    "VmRSS",
    "VmHWM",
    "SigCgt",
    "voluntary_ctxt_switches",
)


def versions() -> dict[str, Any]:
    """Of Python, of the system, and of the packages that matter; none is imported for it."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "python": sys.version,
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": found,
    }


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES).decode(errors="replace")
    except OSError:
        return None


def host(folder: Path | None) -> dict[str, Any]:
    """Facts of this machine.

    Args:
        folder: Of the run; None: there is none.
    """
    disks = {}
    for path in (folder, Path("/dev/shm"), Path("/tmp"), Path.cwd()):  # noqa: S108
        if path is not None:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(path)
                disks[str(path)] = {"total_bytes": usage.total, "free_bytes": usage.free}
    cpus = os.cpu_count()
    limits = {
        name.removeprefix("RLIMIT_").lower(): resource.getrlimit(getattr(resource, name))
        for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_MEMLOCK", "RLIMIT_CORE")
        if hasattr(resource, name)
    }
    return {
        "wall_ms": time.time_ns() // 1_000_000,
        "mono_ns": time.monotonic_ns(),
        "cpus": cpus,
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus,
        "limits": limits,
        "disks": disks,
        "devices": {name: Path(name).exists() for name in _DEVICES},
        "is_root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "files": {name: text for name in _FILES if (text := _read(Path(name))) is not None},
    }


def processes(run_id: str) -> list[dict[str, Any]]:
    """The live processes of a run as the kernel sees them. Never their environment."""
    found = []
    for process in carrying(run_id):
        proc = Path("/proc") / str(process.pid)
        status = dict(
            line.partition(":")[::2] for line in (_read(proc / "status") or "").splitlines() if ":" in line
        )
        found.append(
            {
                "pid": process.pid,
                "command": process.command(),
                "status": {name: status[name].strip() for name in _STATUS if name in status},
                "wchan": _read(proc / "wchan"),
                "open_files": _count(proc / "fd"),
                "threads": list(_threads(proc))[:64],
            }
        )
    return found


def _count(folder: Path) -> int | None:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return None


def _threads(proc: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for task in sorted((proc / "task").iterdir()):
            words = [_read(task / name) or "?" for name in ("comm", "wchan")]
            yield " ".join([task.name, *(word.strip() for word in words)])


def kernel_oom() -> list[str] | str:
    """The newest lines in which the kernel's OOM killer speaks, or why they cannot be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"/dev/kmsg cannot be read: {error.strerror}"
    lines: list[str] = []
    try:
        for _ in range(_KMSG_RECORDS):
            try:
                record = os.read(handle, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten while we read
            except OSError:
                break
            if not record:
                break
            head, _, text = record.partition(";")
            if _OOM.search(text):
                lines.append(f"{head.split(',')[2:3]} {text.splitlines()[0]}")
    finally:
        os.close(handle)
    return lines[-_OOM_LINES:]
