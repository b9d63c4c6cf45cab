"""Lets a process say where it hangs: at a signal of its agent it writes the Python stacks of all its threads.

The handler is :mod:`faulthandler`'s, in C: it needs no interpreter lock, so also a thread that is stuck inside
of native code is shown, with the Python call that it went there by. Only a process that is stopped, or whose
every thread is in an uninterruptible wait, writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from typing import BinaryIO

__all__ = ["SIGNAL", "register"]

#: A real-time signal that nobody else uses; the same number as in ``rust_core/src/agent/evidence.rs``.
SIGNAL = 44
_PATH = "SKY_MONARCH_STACKS"

_file: BinaryIO | None = None


def register(path: str | None = None) -> bool:
    """Answer the signal from now on, with a file that the environment names, or ``path``; whether it does.

    May be called again: a standby has another name once it is promoted. Where there is no agent, or its folder
    is gone, nothing happens.
    """
    global _file  # the descriptor must outlive every caller
    path = path or os.environ.get(_PATH)
    if not path:
        return False
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        _file = file
        return True
    return False
