"""What both ends of the line to a zygote keep."""

from __future__ import annotations

import contextlib
import os

__all__ = ["MOST_BYTES", "MOST_FDS", "hurry"]

#: Of one message.
MOST_BYTES = 128 * 1024
#: Descriptors with one message.
MOST_FDS = 64
_SOONER = 10


def hurry() -> None:
    """Where this user may, let this thread go before what computes here: it does little, and tells of deaths."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - _SOONER)
