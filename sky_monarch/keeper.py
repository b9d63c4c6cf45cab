"""Starts a host's agent again when it is killed.

The agent is a fork of this process, which does nothing but wait for it: little can go wrong in it, it keeps
the niceness, limits and environment that the agent was started with, and what the dead agent leaves behind
is handed to it and ended before another agent runs. So no rank ever lives twice.

An agent that ends by itself stays ended, whatever its exit code, and so does one that was told to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

__all__ = ["DEFECT", "keep"]

#: Exit code of an agent that failed by a defect of its own (EX_SOFTWARE): as good as killed.
DEFECT = 70

# SIGUSR1: Slurm's warning that the host is about to be taken away.
_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
_WATCHED = {*_TOLD, signal.SIGCHLD}
_LOOK_S = 1.0
# A life this long says that its agent works: what kills the next one is news.
_LONG_LIFE_S = 60.0
_MOST_SHORT_LIVES = 10
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 5.0


def keep(run: Callable[[], int], end_orphans: Callable[[], None]) -> int:
    """Run an agent in a child of this process, again whenever it is killed.

    Must be called on the only thread of its process. Returns in the child too, with what ``run`` returned.

    Args:
        run: The agent; returns its exit code.
        end_orphans: Ends what a dead agent left to this process.

    Returns:
        The agent's exit code; 128 plus the signal's number, as a shell has it, where a signal that it was
        told to end by, or the last of ten short lives, ended it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, by inheritance, it would throw exit codes away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    short_lives = 0
    while True:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return _live(run)
        status, told = _watch(pid)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if told or code in {128 + number for number in _TOLD} or (os.WIFEXITED(status) and code != DEFECT):
            return code
        short_lives = 0 if time.monotonic() - started > _LONG_LIFE_S else short_lives + 1
        end_orphans()
        if short_lives >= _MOST_SHORT_LIVES:
            _say(
                f"agent {pid} died ({_cause(status)}), the {short_lives}th time in a row: no more are started"
            )
            return code
        pause_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** max(0, short_lives - 1))
        _say(f"agent {pid} died ({_cause(status)}); another one starts in {pause_s} s")
        if number := _told_within(pause_s):
            return 128 + number


def _live(run: Callable[[], int]) -> int:
    try:
        return run()
    except Exception:
        raise  # an error with a name: what the agent was given cannot be used
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        traceback.print_exc()  # a panic of the core
        os._exit(DEFECT)


def _watch(pid: int) -> tuple[int, bool]:
    """Wait for the end of the agent; returns its wait status, and whether it was told to end."""
    told = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return status, told
        arrived = signal.sigtimedwait(_WATCHED, _LOOK_S)
        if arrived is not None and arrived.si_signo in _TOLD:
            told = True
            os.kill(pid, arrived.si_signo)  # not reaped yet, so the pid is still its own


def _told_within(pause_s: float) -> int:
    """The signal that told this process to end within the next ``pause_s`` seconds; 0 if none did."""
    arrived = signal.sigtimedwait(_TOLD, pause_s)
    return 0 if arrived is None else arrived.si_signo


def _cause(status: int) -> str:
    if os.WIFEXITED(status):
        return f"exit code {os.WEXITSTATUS(status)}, a defect"
    return signal.Signals(os.WTERMSIG(status)).name


def _say(message: str) -> None:
    sys.stderr.write(f"keeper: {message}\n")
    sys.stderr.flush()
