"""Holds a peer together: whatever it starts stays below this process, and ends with it.

    python keeper.py COMMAND…

Orphans of the peer become children of this process, so that their processor time stays in the tree and none
outlives the bench, whichever of bench and peer ends first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.2
_KILLING_S = 10.0


def main() -> int:
    """Run the peer; returns its exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench is told too, and says what follows
    if os.getppid() != parent:  # it died before the kernel was asked to say so
        return 1
    try:  # from before it begins: the peer is there before its start has returned, and may have to be ended by then
        # The descriptor that the bench has handed on is the peer's as well.
        peer = subprocess.Popen(sys.argv[1:], close_fds=False)
        while peer.poll() is None:
            _reap(peer.pid)
            time.sleep(_LOOK_EVERY_S)
    finally:
        _kill_all()
    return peer.wait()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)


def _reap(peer: int) -> None:
    """Wait for orphans that have ended; the peer itself is left to `Popen`."""
    for pid in _children(os.getpid()):
        if pid != peer:
            os.waitpid(pid, os.WNOHANG)


def _kill_all() -> None:
    deadline = time.monotonic() + _KILLING_S
    while (left := _children(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)  # its children become ours: the next look finds them


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
