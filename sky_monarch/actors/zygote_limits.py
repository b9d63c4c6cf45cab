"""What both ends of the line to a zygote keep."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_BYTES", "MOST_FDS", "hurry", "waiting_for_others"]

#: Of one message.
MOST_BYTES = 128 * 1024
#: Descriptors with one message.
MOST_FDS = 64
_SOONER = 10
_LATER = 5


def hurry() -> None:
    """Where this user may, let this thread go before what computes here: it does little, and tells of deaths."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - _SOONER)


@contextlib.contextmanager
def waiting_for_others() -> Iterator[None]:
    """Where this user may take it back, let others go before this process meanwhile."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice - 1)
    except PermissionError:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, nice + _LATER)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
