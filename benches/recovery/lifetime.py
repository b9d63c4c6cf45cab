"""What a bench starts ends with it, whatever ends the bench: its end, an error, Ctrl-C, SIGTERM."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benches.recovery.peers import Peer
from benches.recovery.watch import say


def leave_on_sigterm() -> None:
    """Let SIGTERM end the bench as Ctrl-C does: what it started is ended first."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)


@contextlib.contextmanager
def workplace(*, keep: bool) -> Iterator[Path]:
    """A fresh folder, removed at the end, also where somebody ends the bench, unless it is to be kept or fails."""
    folder = Path(tempfile.mkdtemp(prefix="smb-"))  # a short name: there will be sockets in it
    try:
        yield folder
    except Exception:
        say(f"its logs stay in {folder}")
        raise
    except BaseException:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if not keep:
        shutil.rmtree(folder)


@contextlib.contextmanager
def closing(peer: Peer) -> Iterator[None]:
    """Close ``peer`` at the end; whoever is impatient meanwhile waits (an end takes seconds, and has its limits)."""
    try:
        yield
    finally:
        handlers = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            peer.close()
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
