"""What the host allows a process, and whether it knows its own name."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.doctor.finding import Finding, error, info, ok, warning

__all__ = ["UNLIMITED", "Limits", "check", "measure"]

UNLIMITED = -1
_RESOLVE_LIMIT_S = 3.0
_SMALL_SHM = 1 << 30
_FEW_FILES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the host allows.

    Attributes:
        locked_bytes: Memory that may be locked; :data:`UNLIMITED` for any.
        open_files: Files that a process may be let have open (the hard limit).
        shm_bytes: Size of /dev/shm; None where there is none.
        shm_free_bytes: What is free of it.
        hostname: The host's own name.
        resolves: Whether that resolves; None where that took too long.
    """

    locked_bytes: int
    open_files: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    hostname: str
    resolves: bool | None


def measure(root: Path = Path("/")) -> Limits:
    """Those of this host. Takes three seconds at the most.

    Args:
        root: Where its files lie.
    """
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:
        size = free = None
    else:
        size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    hostname = socket.gethostname()
    return Limits(
        locked_bytes=UNLIMITED if locked == resource.RLIM_INFINITY else locked,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shm_bytes=size,
        shm_free_bytes=free,
        hostname=hostname,
        resolves=_resolves(hostname),
    )


def _resolves(hostname: str) -> bool | None:
    answer: list[bool] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(hostname, None)
        except OSError:
            answer.append(False)
        else:
            answer.append(True)

    # A resolver that does not answer cannot be called off: the thread is left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_LIMIT_S)
    return answer[0] if answer else None


def check(limits: Limits | None, *, accelerated: bool) -> Iterator[Finding]:
    """Everything about limits; those that only matter to devices are not errors without one."""
    if limits is None:
        return
    if limits.resolves:
        yield ok("host.name", f"{limits.hostname} resolves")
    else:
        how = (
            "does not resolve"
            if limits.resolves is False
            else f"was not resolved within {_RESOLVE_LIMIT_S:g} s"
        )
        yield warning(
            "host.name",
            f"this host's own name, {limits.hostname}, {how}: gloo and torch look it up and fail or wait",
            f"add `127.0.1.1 {limits.hostname}` to /etc/hosts, or name the interface (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME); sky-monarch itself uses addresses",
        )
    if limits.shm_bytes is None or limits.shm_free_bytes is None:
        yield error(
            "host.shm", "there is no /dev/shm: data loaders and RCCL need it", "mount a tmpfs at /dev/shm"
        )
    elif limits.shm_free_bytes < _SMALL_SHM:
        small = error if accelerated and limits.shm_bytes < _SMALL_SHM else warning
        yield small(
            "host.shm",
            f"{limits.shm_free_bytes >> 20} of {limits.shm_bytes >> 20} MiB of /dev/shm are free: RCCL and data "
            "loaders fail with ENOSPC (pytorch #196616)",
            "remove what killed runs left there; in a container pass --ipc=host or --shm-size=16g",
        )
    else:
        yield ok("host.shm", f"{limits.shm_free_bytes >> 30} GiB of /dev/shm are free")
    if limits.open_files < _FEW_FILES:
        yield warning(
            "host.open_files",
            f"a process may have at most {limits.open_files} files open: connections between many ranks use them up",
            "raise nofile to 1048576 (/etc/security/limits.d, LimitNOFILE for services)",
        )
    yield info(
        "host.firewall",
        "TorchFT's managers listen on every interface without authentication",
        "let only the run's own hosts reach each other's ports, by a firewall or a private network",
    )
