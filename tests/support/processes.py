"""Looking at the processes of this machine, from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def environ_of(pid: int) -> dict[str, str]:
    """Environment that ``pid`` was started with; empty where it is gone or not ours."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def is_alive(pid: int) -> bool:
    """True while ``pid`` runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def is_stopped(pid: int) -> bool:
    """True once every thread of ``pid`` stands still: a signal that stops it takes a moment."""
    return {text.rpartition(")")[2].split()[0] for text in _of_threads(pid, "stat")} == {"T"}


def threads_of(pid: int) -> list[str]:
    """Names of its threads."""
    return [name.rstrip("\n") for name in _of_threads(pid, "comm")]


def send(to: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of them that is still there: what was listed a moment ago may have ended since."""
    wanted = list(to)
    assert all(pid > 1 for pid in wanted), f"{wanted}: 0 would be the group of this very process"
    for pid in wanted:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def parent_of(pid: int) -> int:
    """Its parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> set[int]:
    """Its children, of all its threads."""
    return {int(child) for text in _of_threads(pid, "children") for child in text.split()}


def _of_threads(pid: int, name: str) -> list[str]:
    """What that file of each thread holds; nothing of those that end meanwhile."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found.append((thread / name).read_text())
    return found


def pids() -> list[int]:
    """Every process that can be seen."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def with_variable(name: str, value: str) -> dict[int, str]:
    """Live processes whose environment holds ``name=value``, with their command line."""
    found = {}
    for pid in pids():
        if environ_of(pid).get(name) == value and is_alive(pid):
            try:
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
    return found


def zombies_of(parent: int) -> list[int]:
    """Zombies whose parent is ``parent``."""
    found = []
    for pid in pids():
        try:
            state, ppid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(ppid) == parent:
            found.append(pid)
    return found
