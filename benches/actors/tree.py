"""What a process and all below it have cost so far, read from /proc by somebody outside of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Linux: the clock of another process's processor time has this number (clock_getcpuclockid(3)).
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A process, and what it has used.

    Attributes:
        pid: Which one.
        parent: Its parent's pid.
        own_s: Processor time of its threads, also of those that have ended.
        reaped_s: Processor time of the children that it has waited for, and of theirs.
    """

    pid: int
    parent: int
    own_s: float
    reaped_s: float


def tree(root: int) -> list[Usage]:
    """The process ``root`` and all its descendants that are there now.

    Of a family whose elder dies, the young ones belong to the next subreaper: `keeper` makes one of each peer.
    """
    found = {
        usage.pid: usage for path in Path("/proc").iterdir() if path.name.isdigit() and (usage := _read(path))
    }
    children: dict[int, list[int]] = {}
    for usage in found.values():
        children.setdefault(usage.parent, []).append(usage.pid)
    members, queue = [], [root] if root in found else []
    while queue:
        pid = queue.pop()
        members.append(found[pid])
        queue.extend(children.get(pid, []))
    return members


def cpu_s(root: int) -> float:
    """Processor time that the tree of ``root`` has used: of those alive to the nanosecond, of the dead by the tick."""
    return sum(usage.own_s + usage.reaped_s for usage in tree(root))


def private_bytes(pid: int) -> int:
    """Memory that would be free if this one process ended.

    Raises:
        OSError: It has ended.
    """
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            total += int(line.split()[1]) * 1024
    return total


def _read(path: Path) -> Usage | None:
    try:
        # The name may hold anything, also blanks and parentheses; nothing behind its end does.
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    pid = int(path.name)
    try:
        own_s = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:  # a zombie has no clock any more, but its sums
        own_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return Usage(
        pid=pid,
        parent=int(fields[1]),
        own_s=own_s,
        reaped_s=(int(fields[13]) + int(fields[14])) * _TICK_S,
    )
