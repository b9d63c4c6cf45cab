"""How fast this host moves bytes by itself: over loopback TCP, and out of another process's memory (CMA).

A group that comes back gets its state by these where no NIC does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sky_monarch.doctor.finding import Finding, info, warning

__all__ = ["check", "main", "measure"]

_BYTES = 64 << 20
_ROUNDS = 4
_LIMIT_S = 20.0
_CHUNK = 1 << 20
_GIB = 1 << 30


def measure() -> dict[str, Any]:
    """``{"tcp_gibps", "cma_gibps", "cma_error"}``; None for what did not work."""
    found: dict[str, Any] = {"tcp_gibps": None, "cma_gibps": None, "cma_error": None}
    with contextlib.suppress(OSError):
        found["tcp_gibps"] = _tcp()
    try:
        found["cma_gibps"] = _cma()
    except OSError as error:
        found["cma_error"] = error.strerror or str(error)
    return found


def check(speeds: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What was measured."""
    if speeds is None:
        return
    if speeds["tcp_gibps"] is not None:
        yield info("host.tcp", f"{speeds['tcp_gibps']:.1f} GiB/s over one loopback connection")
    if speeds["cma_gibps"] is not None:
        yield info(
            "host.cma", f"{speeds['cma_gibps']:.1f} GiB/s out of another process's memory, one thread (CMA)"
        )
    elif speeds["cma_error"] is not None:
        yield warning(
            "host.cma",
            f"a process may not read another one's memory ({speeds['cma_error']}): healing on one host goes over TCP",
            "`sysctl kernel.yama.ptrace_scope=0`; in a container pass --cap-add=SYS_PTRACE and share the pid namespace",
        )


def _tcp() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=_LIMIT_S)
        served, _ = server.accept()
    with client, served:
        served.settimeout(_LIMIT_S)
        chunk = bytes(_CHUNK)

        def send() -> None:
            with contextlib.suppress(OSError):
                for _ in range(_BYTES * _ROUNDS // _CHUNK):
                    client.sendall(chunk)

        sending = threading.Thread(target=send, daemon=True)
        begun_s = time.monotonic()
        sending.start()
        into, left = bytearray(_CHUNK), _BYTES * _ROUNDS
        while left > 0:
            count = served.recv_into(into)
            if not count:
                raise ConnectionResetError
            left -= count
        taken_s = time.monotonic() - begun_s
        sending.join(_LIMIT_S)
    return _BYTES * _ROUNDS / taken_s / _GIB


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _cma() -> float:
    """Have a child read our memory, as a joiner reads a donor's: for yama that is not one of its own."""
    with mmap.mmap(-1, _BYTES) as memory:
        memory.write(b"\x55" * _BYTES)
        view = ctypes.c_char.from_buffer(memory)
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "sky_monarch.doctor.paths",
                    str(os.getpid()),
                    str(ctypes.addressof(view)),
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(0, f"it was not done after {_LIMIT_S:g} s") from error
        finally:
            del view
    if done.returncode != 0:
        raise OSError(0, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return float(done.stdout)


def main() -> int:
    """Be the child: read the memory of a process, and say how fast that went."""
    pid, address = map(int, sys.argv[1:3])
    with mmap.mmap(-1, _BYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        into, source = _Vector(ctypes.addressof(view), _BYTES), _Vector(address, _BYTES)
        begun_s = 0.0
        try:
            for rounds in (1, _ROUNDS):  # the first touches the pages
                begun_s = time.monotonic()
                for _ in range(rounds):
                    _read(pid, into, source)
        except OSError as error:
            print(error.strerror, file=sys.stderr)  # noqa: T201
            return 1
        taken_s = time.monotonic() - begun_s
        same = memory[0] == memory[-1] == 0x55
        del view, into
    if not same:
        print("other bytes came than were there", file=sys.stderr)  # noqa: T201
        return 1
    print(_BYTES * _ROUNDS / taken_s / _GIB)  # noqa: T201
    return 0


def _read(pid: int, into: _Vector, source: _Vector) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = read(pid, ctypes.byref(into), 1, ctypes.byref(source), 1, 0)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if done != into.length:
        raise OSError(0, f"{done} of {into.length} bytes came")


if __name__ == "__main__":
    sys.exit(main())
