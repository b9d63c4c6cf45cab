"""What a controller does without the history of its run: says so, and looks for what else knows of it.

The agents know most: what each group is doing and which of its budget is spent. The folder of the run knows the
rest that matters: which generations there were, so that none is begun twice, and whether the run has ended.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.controller.journal import Journal, damaged_name, set_aside
from sky_monarch.controller.journal_schema import damaged
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.placing import read_scale

__all__ = ["begun", "lost_row", "open_journal", "recall", "successor_row"]

_log = structlog.get_logger()

_OPEN_S = 5.0
_PAUSE_S = 0.25
_PAGE = 2000
_FOR_GOOD = 2**63  # what the lighthouse lets in no more at all
_SLOT = re.compile(r"r(\d+)-\d+")
_SEGMENT = re.compile(r"g(\d+)-\d+\.log")


def open_journal(path: Path, *, patience_s: float = _OPEN_S) -> tuple[Journal, str | None]:
    """Open the journal of a run, whatever became of it.

    One that is damaged is set aside for a fresh one. Where the disk takes nothing for ``patience_s``, there is one
    in memory, so that the run has a controller all the same.

    Returns:
        The journal, and why the history is lost; None where nothing is.

    Raises:
        ConfigError: A newer sky-monarch wrote it.
    """
    deadline = time.monotonic() + patience_s
    kept = damaged_name(path)
    lost = f"it was damaged and is kept as {kept.name}" if kept.exists() and not path.exists() else None
    alone = False
    while True:
        try:
            return Journal(path, alone=alone), lost
        except (sqlite3.Error, OSError) as error:
            if damaged(error):
                lost = f"it is damaged ({error}) and kept as {set_aside(path)}"
            elif time.monotonic() > deadline:
                return Journal(
                    None
                ), f"it cannot be opened ({error}); until the run ends there is one in memory"
            else:
                alone = not alone
                time.sleep(_PAUSE_S)


def recall(
    journal: Journal, nothing: Callable[[], Memory], lost: str | None
) -> tuple[Journal, Memory, str | None]:
    """Read a journal from its newest summary on; one that cannot be read is set aside for a fresh one.

    Args:
        journal: To read.
        nothing: Makes an empty memory.
        lost: Why the history before it is lost, where it is.

    Returns:
        The journal to go on with, what it tells, and why the history is lost.

    Raises:
        sqlite3.OperationalError: It may be readable to the next process.
    """
    memory = nothing()
    try:
        _read(journal, memory)
    except (sqlite3.DatabaseError, ValueError, LookupError, TypeError, AttributeError) as error:
        if (isinstance(error, sqlite3.OperationalError) and not damaged(error)) or journal.path is None:
            raise
        _log.exception("the journal cannot be read")
        lost = f"it cannot be read ({type(error).__name__}: {error}) and is kept as {journal.set_aside()}"
        return Journal(journal.path), nothing(), lost
    if journal.last_id:
        _log.info("state rebuilt", events=journal.last_id, state=str(memory.state.phase))
    return journal, memory, lost


def _read(journal: Journal, memory: Memory) -> None:
    after = 0
    if (summary := journal.summary()) is not None:
        after, document = summary
        memory.restore(document)
    while page := journal.read(after, _PAGE):
        for row in page:
            memory.apply(row)
        after = page[-1]["id"]


def lost_row(run_dir: Path, why: str | None, *, replicas: int) -> dict[str, Any] | None:
    """The event that begins a journal in place of a lost one.

    Args:
        run_dir: Folder of the run.
        why: What became of the lost one; None where nothing is known of any.
        replicas: Replica groups that the run began with.

    Returns:
        None where there never was one: the run is new.
    """
    scaled = read_scale(run_dir)
    placed = None if scaled is None else scaled.pop("placed")
    most = replicas if scaled is None else replicas + sum(map(len, scaled["homes"].values()))
    generations = _generations(run_dir / "logs", range(most))
    final = _final(run_dir / "final.json")
    if why is None and not generations and final is None and scaled is None:
        return None
    return {
        "event": "journal_lost",
        "reason": why or "it is gone",
        "generations": {str(replica): generation for replica, generation in sorted(generations.items())},
        "final": final,
        **({} if scaled is None else {"scaled": scaled}),
        **({} if placed is None else {"placed": placed}),
    }


def successor_row(told: Mapping[str, Any], began: Collection[int]) -> dict[str, Any]:
    """The event that begins the journal of a head which follows a lost one.

    Args:
        told: What the launcher knows of the run (``provision.succession``).
        began: Groups that the run began with.
    """
    names = ("attempt", "reason", "step", "hosts", "generations", "spent")
    row = {"event": "head_replaced", **{name: told[name] for name in names}}
    replicas = told["replicas"]
    if replicas is not None and replicas != len(began):
        added = {name: [one for one in mine if one not in began] for name, mine in told["homes"].items()}
        row["scaled"] = {"replicas": replicas, "homes": {name: mine for name, mine in added.items() if mine}}
    return row


def begun(run_dir: Path, replicas: Container[int]) -> dict[int, int]:
    """The newest generation of each of those groups that has left a trace in the folder of the run.

    An agent that dies takes with it what its controller has not heard yet, such as generations that it began.
    """
    found = _generations(run_dir / "logs", replicas)
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        fences = json.loads((run_dir / "lighthouse.state").read_bytes())["fences"]
        for replica, fence in ((int(name), int(value)) for name, value in fences.items()):
            if replica in replicas and fence < _FOR_GOOD:
                found[replica] = max(fence - 1, found.get(replica, 0))
    return found


def _generations(logs: Path, replicas: Container[int]) -> dict[int, int]:
    """The newest generation of each group that has written a log here."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for slot in logs.iterdir():
            match = _SLOT.fullmatch(slot.name)
            if match is None or int(match[1]) not in replicas:
                continue
            names = (_SEGMENT.fullmatch(segment.name) for segment in slot.iterdir())
            newest = max((int(name[1]) for name in names if name), default=0)
            if newest:
                found[int(match[1])] = max(newest, found.get(int(match[1]), 0))
    return found


def _final(path: Path) -> Mapping[str, Any] | None:
    try:
        final = json.loads(path.read_bytes())
        return {
            "state": str(final["state"]),
            "reason": str(final["reason"]),
            "exit_code": int(final["exit_code"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
