"""Processes of a run, told apart from others that got the same pid later."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "carrying", "command_lines", "end", "start_ticks"]

_PROC = Path("/proc")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A process by pid and start time.

    Attributes:
        pid: Its pid.
        start_ticks: Field 22 of ``/proc/<pid>/stat``: clock ticks from boot to its start.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now; None where there is none (or only a zombie)."""
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid, ticks)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return start_ticks(self.pid) == self.start_ticks

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP or a debugger; False where the system does not say."""
        try:
            stat = (_PROC / str(self.pid) / "stat").read_bytes()
        except OSError:
            return False
        return self.alive and stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, and never to a later owner of its pid."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

    def arguments(self) -> list[str]:
        """Its command line; empty where it is gone."""
        try:
            text = (_PROC / str(self.pid) / "cmdline").read_bytes()
        except OSError:
            return []
        return text.decode(errors="replace").rstrip("\0").split("\0")

    def command(self) -> str:
        """Its command line for people, shortened to 120 characters; empty where it is gone."""
        return " ".join(self.arguments()).strip()[:120]


def start_ticks(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None where it is gone or a zombie.

    Where there is no ``/proc`` (macOS), a living process counts as started at 0.
    """
    if not sys.platform.startswith("linux"):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, PermissionError):
            return None
        return 0
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold anything, even brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def carrying(run_id: str) -> list[Process]:
    """Every process of this user, but not this one, that carries ``SKY_MONARCH_RUN_ID=<run_id>``."""
    mark = b"\0SKY_MONARCH_RUN_ID=" + run_id.encode() + b"\0"
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue  # another user's, or gone
        if mark in b"\0" + environ + b"\0" and (process := Process.of(int(entry.name))):
            found.append(process)
    return found


def command_lines(word: str) -> list[list[str]]:
    """The arguments of every process that has ``word`` as one of them; those that are gone have none."""
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")[:-1]
                if word in arguments:
                    found.append(arguments)
    return found


def _wait(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [process for process in left if process.alive]
    return left


def end(
    run_id: str, *, first: Iterable[Process] = (), grace_s: float, kill_wait_s: float = 5.0
) -> list[Process]:
    """End everything of a run: TERM, wait, KILL; then again for whatever was born meanwhile.

    Args:
        run_id: Whose processes.
        first: Supervisors that get TERM alone, and ``grace_s`` plus two seconds to end their own children in
            order.
        grace_s: Seconds between TERM and KILL.
        kill_wait_s: Seconds in all for the killed to disappear.

    Returns:
        What is still alive (in uninterruptible sleep, say). Empty is the rule.
    """
    supervisors = [process for process in first if process.alive]
    for process in supervisors:
        process.signal(signal.SIGTERM)
    stuck = _wait(supervisors, grace_s + 2.0)
    rest = carrying(run_id)
    for process in rest:
        process.signal(signal.SIGTERM)
    _wait(rest, 0.2 if stuck else grace_s)
    deadline = time.monotonic() + kill_wait_s
    while True:
        left = list({*carrying(run_id), *(process for process in supervisors if process.alive)})
        if not left or time.monotonic() > deadline:
            return left
        for process in left:
            process.signal(signal.SIGKILL)
        _wait(left, 0.5)
