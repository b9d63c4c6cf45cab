"""What both ends of the line to a zygote keep, and whose turn it is to compute."""

from __future__ import annotations

import contextlib
import os

__all__ = ["LATER", "MOST_BYTES", "MOST_FDS", "give_way", "hurry", "take_turns"]

#: Of one message.
MOST_BYTES = 128 * 1024
#: Descriptors with one message.
MOST_FDS = 64
_SOONER = 10
#: How much nicer than others a process is for which nobody waits yet.
LATER = 5
#: At the threads of a process that starts more and more of them.
_MOST_LOOKS = 8


def hurry() -> bool:
    """Where this user may, let this thread go before what computes here: it does little, and tells of deaths.

    Returns:
        Whether it may: then it may take the same from others, and give it back.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - _SOONER)
    except PermissionError:
        return False
    return True


def give_way(pid: int) -> None:
    """Let a process that has just been forked compute only while nobody else does."""
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def take_turns(pid: int, nice: int) -> None:
    """Let a process compute beside others, with priority ``nice``: all its threads, as an import may start some."""
    for _ in range(_MOST_LOOKS):
        if not _raise_threads(pid, nice):
            return


def _raise_threads(pid: int, nice: int) -> bool:
    """Do so with those that are there. Whether there were any: another one may have begun behind them, as they were."""
    changed = False
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  (a path object costs more than all the rest)
            thread = int(name)
            with contextlib.suppress(OSError):  # so has this one
                is_other = os.sched_getscheduler(thread) == os.SCHED_OTHER
                if not is_other or os.getpriority(os.PRIO_PROCESS, thread) != nice:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    changed = True
    return changed
