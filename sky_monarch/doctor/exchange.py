"""How fast the devices of this host exchange, all together and two by two: a process for each.

``python -m sky_monarch.doctor.exchange RANK RANKS BYTES`` is one of them: it reads the communicator's id from its
standard input, as hexadecimal digits, and prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sky_monarch import _core

__all__ = ["main", "measure"]

_BYTES = 64 << 20
_SIMULATED_BYTES = 1 << 20
_LIMIT_S = 120.0
_STEP_LIMIT_S = 20.0
_ROUNDS = 5
_GIB = 1 << 30


def measure(report: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What the devices reach together; None where there are not two that work.

    Args:
        report: What they say of themselves (``_core.gpu_report``).
        env: Environment of the processes; by default this one's.

    Returns:
        ``{"bytes", "all_reduce_gibps", "pairs": [[device, device, gibps], …]}``, or ``{"failed": why}``.
    """
    devices = report.get("devices") or ()
    if len(devices) < 2 or not all(device["works"] for device in devices):
        return None
    size = _SIMULATED_BYTES if report["simulated"] else _BYTES
    ranks = len(devices)
    command = [sys.executable, "-m", "sky_monarch.doctor.exchange"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=None if env is None else dict(env),
        )
        for rank in range(ranks)
    ]
    try:
        return _collect(started, size)
    finally:
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            # One in an uninterruptible sleep of a driver does not end: it is not waited for without end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5)


def _collect(started: list[subprocess.Popen[str]], size: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + _LIMIT_S
    first, *others = started
    unique_id = _hand_over(first, "make\n")
    for child in others:
        with contextlib.suppress(OSError):
            _told(child, unique_id)
    pairs: list[list[float]] = []
    speed = None
    for rank, child in enumerate(started):
        try:
            out, said = child.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"failed": f"device {rank} was not done after {_LIMIT_S:g} s"}
        if child.returncode != 0:
            last = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            return {"failed": f"device {rank}: {last[-300:]}"}
        told = json.loads(out.splitlines()[-1])
        pairs += told["pairs"]
        speed = told["all_reduce_gibps"] if rank == 0 else speed
    return {"bytes": size, "all_reduce_gibps": speed, "pairs": pairs}


def _told(child: subprocess.Popen[str], line: str) -> None:
    if child.stdin is not None:
        child.stdin.write(line)
        child.stdin.flush()


def _hand_over(child: subprocess.Popen[str], line: str) -> str:
    """What a child answers; empty where it ends, or takes so long that it is ended."""
    ended = threading.Timer(_STEP_LIMIT_S, child.kill)
    ended.start()
    try:
        with contextlib.suppress(OSError):
            _told(child, line)
        return "" if child.stdout is None else child.stdout.readline()
    finally:
        ended.cancel()


def main() -> int:
    """Be the process of one device."""
    from sky_monarch import _core

    rank, ranks, size = map(int, sys.argv[1:4])
    word = sys.stdin.readline().strip()
    unique_id = _core.communicator_id() if word == "make" else bytes.fromhex(word)
    if word == "make":
        print(unique_id.hex(), flush=True)  # noqa: T201
    communicator = _core.Communicator(
        unique_id, rank, ranks, device=rank, start_s=_STEP_LIMIT_S, operation_s=_STEP_LIMIT_S, abort_s=10.0
    )
    buffers = [_core.DeviceBuffer(size, device=rank) for _ in range(2)]
    buffers[0].write(bytes(size))
    taken_s = _all_reduce(communicator, buffers[0])
    # Each byte crosses 2 (n - 1) / n times, as RCCL's own tests count it.
    speed = size / taken_s / _GIB * 2 * (ranks - 1) / ranks
    pairs = [
        [one, other, found]
        for one, other in combinations(range(ranks), 2)
        if (found := _pair(communicator, buffers, {one: other, other: one}.get(rank))) is not None
        and rank == one
    ]
    communicator.close(_STEP_LIMIT_S)
    print(json.dumps({"all_reduce_gibps": speed, "pairs": pairs}))  # noqa: T201
    return 0


def _whole(buffer: _core.DeviceBuffer) -> tuple[int, int]:
    return buffer.address, buffer.nbytes


def _all_reduce(communicator: _core.Communicator, buffer: _core.DeviceBuffer) -> float:
    """Seconds of one all_reduce, after one that does not count."""
    for rounds in (1, _ROUNDS):
        begun_s = time.monotonic()
        for _ in range(rounds):
            communicator.all_reduce(_whole(buffer), _whole(buffer), "float32", "sum", buffer)
        communicator.wait(_STEP_LIMIT_S)
    return (time.monotonic() - begun_s) / _ROUNDS


def _pair(
    communicator: _core.Communicator, buffers: list[_core.DeviceBuffer], peer: int | None
) -> float | None:
    """GiB/s in each direction between two devices at once, while all others wait; None for those."""
    first, last = map(_whole, buffers)
    begun_s = time.monotonic()
    for rounds in (1, _ROUNDS):
        # All begin together.
        communicator.all_reduce((first[0], 4), (first[0], 4), "float32", "max", buffers)
        communicator.wait(_STEP_LIMIT_S)
        begun_s = time.monotonic()
        for _ in range(rounds if peer is not None else 0):
            communicator.exchange([(peer or 0, first)], [(peer or 0, last)], buffers)
        communicator.wait(_STEP_LIMIT_S)
    return None if peer is None else first[1] * _ROUNDS / (time.monotonic() - begun_s) / _GIB


if __name__ == "__main__":
    # No clean-up of a vendor's library: what hangs in it would hang here.
    code = main()
    sys.stdout.flush()
    os._exit(code)
