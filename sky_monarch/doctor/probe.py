"""Trying the libraries and devices of this host, in a child that is ended when it takes too long.

``python -m sky_monarch.doctor.probe [--bench]`` is that child: it prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sky_monarch.doctor import clock, smi

__all__ = ["adjtimex", "kernel_log", "main", "probe", "tools", "torch_hip"]

#: 30 seconds for eight devices on a slow host; measuring takes longer.
SMOKE_LIMIT_S = 60.0
BENCH_LIMIT_S = 180.0
_TOOL_LIMIT_S = 5.0


def probe(
    *, bench: bool = False, limit_s: float | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What libraries and devices say of themselves; ``{"failed": why}`` where that hung or crashed.

    Args:
        bench: Measure copies, too.
        limit_s: For all of it.
        env: Environment of the child; by default this process's.
    """
    limit_s = limit_s if limit_s is not None else BENCH_LIMIT_S if bench else SMOKE_LIMIT_S
    command = [sys.executable, "-m", "sky_monarch.doctor.probe", *(["--bench"] if bench else [])]
    done, out, said = _run(command, limit_s, env)
    if done is None:
        return {"failed": f"was not done after {limit_s:g} s"}
    if done < 0:
        return {"failed": f"ended by {signal.Signals(-done).name}"}
    try:
        report = json.loads(out)
    except ValueError:
        return {"failed": f"failed with exit code {done}: {said.strip()[-300:]}"}
    return dict(report)


def kernel_log() -> str:
    """The kernel's log, as far as this user may read it."""
    try:
        done, out, _ = _run(["dmesg"], _TOOL_LIMIT_S, None)
    except OSError:
        return ""
    return out if done == 0 else ""


def tools() -> dict[str, str]:
    """What this host's tools print, by command line; what is not installed, or fails, is not there."""
    found = {"dmesg": kernel_log(), clock.ADJTIMEX: adjtimex()}
    for line in (smi.METRIC, smi.STATIC, clock.CHRONY):
        words = line.split()
        if shutil.which(words[0]) is None:
            continue
        try:
            done, out, _ = _run(words, _TOOL_LIMIT_S, None)
        except OSError:
            continue
        if done == 0:
            found[line] = out
    return found


def adjtimex() -> str:
    """What the kernel says of its clock, without changing it (:data:`sky_monarch.doctor.clock.ADJTIMEX`)."""
    import ctypes

    # struct timex, of which only the beginning is read: modes, offset, freq, maxerror, esterror, status.
    room = (ctypes.c_long * 64)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(room)
    except (AttributeError, OSError):
        return ""
    return "" if state < 0 else f"{state} {room[5] & 0xFFFFFFFF} {room[3]}"


def torch_hip() -> str | None:
    """``torch.version.hip`` of the torch that is installed, without importing it; "" for another build of it."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0].strip() == "hip":
            return "" if value.strip() == "None" else value.strip().strip("'\"")
    return ""


def _run(command: list[str], limit_s: float, env: Mapping[str, str] | None) -> tuple[int | None, str, str]:
    """Run a command in a session of its own; the exit code is None where it had to be ended."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=None if env is None else dict(env),
    )
    try:
        out, said = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process in an uninterruptible sleep of a driver does not end: it is not waited for without end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=5)
        return None, "", ""
    return child.returncode, out, said


#: Where torch's wheels keep the copies that ranks will use: variable, package, pattern.
_BROUGHT_BY_TORCH = (
    ("SKY_MONARCH_HIP_LIB", "torch", "lib/libamdhip64.so*"),
    ("SKY_MONARCH_RCCL_LIB", "torch", "lib/librccl.so*"),
    ("SKY_MONARCH_CUDART_LIB", "nvidia", "*/lib/libcudart.so.*"),
    ("SKY_MONARCH_NCCL_LIB", "nvidia", "nccl/lib/libnccl.so.*"),
)


def _name_copies_of_torch() -> None:
    """Try the libraries that torch will load, where it brings its own; loading torch itself takes seconds."""
    for variable, package, pattern in _BROUGHT_BY_TORCH:
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            continue
        found = [
            file
            for folder in (spec.submodule_search_locations or () if spec else ())
            for file in sorted(Path(folder).glob(pattern))
        ]
        if found:
            os.environ.setdefault(variable, str(found[-1]))


def main() -> int:
    """Print the report of this host."""
    from sky_monarch import _core

    _name_copies_of_torch()
    print(_core.gpu_report(bench="--bench" in sys.argv[1:]))  # noqa: T201
    return 0


if __name__ == "__main__":
    # No clean-up of a vendor's library: what hangs in it would hang here.
    code = main()
    sys.stdout.flush()
    os._exit(code)
