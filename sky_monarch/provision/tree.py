"""All processes of one local host: whoever descends from it, is in its session, or carries its mark."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.launch.process import Process

__all__ = ["Tree"]

_PROC = Path("/proc")
_LOOK_AGAIN_S = 0.02
_KILL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Entry:
    process: Process
    parent: int
    session: int
    alive: bool


def _table() -> dict[int, _Entry]:
    found = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_bytes()
        except OSError:
            continue  # it ended
        fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold anything, even brackets
        pid = int(folder.name)
        found[pid] = _Entry(
            process=Process(pid, int(fields[19])),
            parent=int(fields[1]),
            session=int(fields[3]),
            alive=fields[0] not in (b"Z", b"X"),
        )
    return found


@dataclass(frozen=True, slots=True)
class Tree:
    """The processes of one attempt of one host.

    Attributes:
        leader: The process that was started, in a session of its own; None where it is not known (any more).
        mark: ``NAME=value`` that it was started with, and all that inherit its environment.
    """

    leader: Process | None
    mark: str

    def members(self) -> list[Process]:
        """Who lives now. Once the leader is gone its session may be anybody's (after a reboot, say): not the mark."""
        table = _table()
        mark = b"\0" + self.mark.encode() + b"\0"
        leader = self.leader
        known = table.get(leader.pid) if leader else None
        session = leader.pid if leader and known and known.process == leader else None
        found = {pid for pid, entry in table.items() if entry.session == session or _carries(pid, mark)}
        children: dict[int, list[int]] = {}
        for pid, entry in table.items():
            children.setdefault(entry.parent, []).append(pid)
        todo = list(found)
        while todo:
            new = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
            found.update(new)
            todo += new
        return [table[pid].process for pid in found if table[pid].alive]

    def end(self, *, grace_s: float) -> list[Process]:
        """TERM to the leader, which ends its own in order; after ``grace_s``, or without it, KILL to all.

        Args:
            grace_s: Seconds for the leader.

        Returns:
            What is still alive: in an uninterruptible sleep, say.
        """
        leader = self.leader
        if leader is not None and leader.alive:
            leader.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while leader.alive and time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN_S)
            # The keeper would start another agent for one that is killed, and adopts what that leaves behind.
            leader.signal(signal.SIGSTOP)
        deadline = time.monotonic() + _KILL_WAIT_S
        empty = 0
        while True:
            left = self.members()
            below = [process for process in left if process != leader] or left
            # One look is no snapshot: a process can fork behind it and end before it. Two in a row are.
            empty = 0 if left else empty + 1
            if empty == 2 or time.monotonic() > deadline:
                return left
            for process in below:
                process.signal(signal.SIGKILL)
            if left:
                time.sleep(_LOOK_AGAIN_S)


def _carries(pid: int, mark: bytes) -> bool:
    try:
        return mark in b"\0" + (_PROC / str(pid) / "environ").read_bytes() + b"\0"
    except OSError:
        return False  # it ended, or is another user's
