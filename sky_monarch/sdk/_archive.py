"""Reads runs that no controller answers for: their final status, journal and log files. Never writes."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sky_monarch.errors import ConfigError, SystemCallError
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.sdk.types import Event, LogLine, RunStatus

__all__ = ["Selection", "events", "final_status", "log_bytes", "log_lines", "skip_bytes", "status"]

_SEGMENT = re.compile(r"g(\d+)-(\d+)\.log")
_SLOT = re.compile(r"r(\d+)-(\d+)")
_CHUNK_BYTES = 1 << 20


class Selection:
    """Which output is wanted.

    Args:
        replica: One replica group; None: all of them.
        rank: One rank; None: all of them.
        generation: One generation; None: all of them.
        setup: The output of ``setup`` instead.
    """

    def __init__(
        self,
        *,
        replica: int | None = None,
        rank: int | None = None,
        generation: int | None = None,
        setup: bool = False,
    ) -> None:
        for what, value in (("replica", replica), ("rank", rank), ("generation", generation)):
            if value is not None and value < 0:
                raise ConfigError(f"{what} {value}: it cannot be negative")
        self.replica = replica
        self.rank = rank
        self.generation = generation
        self.setup = setup

    @property
    def one_process(self) -> bool:
        """Whether it names one slot (or ``setup``), whose exact bytes can be had."""
        return self.setup or (self.replica is not None and self.rank is not None)

    def require_one_process(self) -> None:
        """Refuse to mix the bytes of several processes.

        Raises:
            ConfigError: It names more than one.
        """
        if not self.one_process:
            raise ConfigError("exact bytes are to be had of one process", hint="give both replica and rank")

    def query(self) -> dict[str, str]:
        """Parameters of a request."""
        if self.setup:
            return {"replica": "setup"}
        named = {"replica": self.replica, "rank": self.rank, "generation": self.generation}
        return {key: str(value) for key, value in named.items() if value is not None}

    def slots(self, run: Path) -> list[tuple[list[Path], int | None, int | None]]:
        """Folders in a run's that match: ``(folders, replica, rank)`` in order.

        A slot has several where hosts were rehearsed, one on each host that its group was on.
        """
        roots = [run / "logs", *sorted(run.glob("hosts/*/logs"))]
        if self.setup:
            there = [root / "setup" for root in roots if (root / "setup").is_dir()]
            return [(there, None, None)] if there else []
        found: dict[tuple[int, int], list[Path]] = {}
        for root in roots:
            with contextlib.suppress(FileNotFoundError):
                for folder in root.iterdir():
                    if match := _SLOT.fullmatch(folder.name):
                        replica, rank = int(match[1]), int(match[2])
                        if self.replica in (None, replica) and self.rank in (None, rank):
                            found.setdefault((replica, rank), []).append(folder)
        return [(folders, replica, rank) for (replica, rank), folders in sorted(found.items())]

    def segments(self, folders: list[Path]) -> list[tuple[int, list[Path]]]:
        """Log files of one slot: ``(generation, files in order)``."""
        by_generation: dict[int, list[tuple[int, int, Path]]] = {}
        for place, folder in enumerate(folders):
            for path in folder.iterdir():
                if match := _SEGMENT.fullmatch(path.name):
                    generation = int(match[1])
                    if self.generation in (None, generation):
                        by_generation.setdefault(generation, []).append((place, int(match[2]), path))
        return [
            (generation, [path for _, _, path in sorted(parts)])
            for generation, parts in sorted(by_generation.items())
        ]


def status(folder: RunFolder) -> RunStatus | None:
    """The status that the folder alone tells; None while a controller should be asked."""
    phase = folder.phase()
    if phase is Phase.LIVE:
        return None
    if phase is Phase.ENDED and (final := folder.final) is not None:
        return final_status(folder, final)
    info = folder.info
    known = _known(folder)
    if phase is Phase.LAUNCHING:
        reason = f"being launched by pid {info.get('launcher_pid')}"
        if folder.head is not None and (launcher := folder.agent()) is not None:
            again = " again: the one before was lost," if folder.head_was_lost else ""
            reason = f"its head, the cluster {folder.head}, is being launched{again} by pid {launcher.pid}"
        return RunStatus.from_json({**known, "state": "PENDING", "reason": reason})
    what = "its agent is gone and left no final status"
    if phase is Phase.ENDED:
        what = "its final status cannot be read"
    elif not folder.path.exists():
        what = "its folder was removed"
    reason = f"{what}; `sky-monarch down {folder.run_id}` ends what remains"
    if phase is Phase.LOST and folder.resumable:
        reason += f", `sky-monarch attach {folder.run_id}` takes it up again"
    return RunStatus.from_json({**known, "state": "LOST", "reason": reason, "exit_code": 1})


def _known(folder: RunFolder) -> dict[str, Any]:
    return {
        "run_id": folder.run_id,
        "name": folder.name,
        "infra": str(folder.info.get("infra", "local")),
        "created_ms": folder.created_ms,
        "run_dir": str(folder.path),
    }


def final_status(folder: RunFolder, final: Mapping[str, Any]) -> RunStatus:
    """The status of an ended run. Of a file that somebody damaged it is what can be told without it."""
    try:
        found = RunStatus.from_json({**_known(folder), **final})
        if found.ended:
            return found
    except (TypeError, ValueError, AttributeError):
        pass
    reason = f"{folder.path / 'final.json'} holds no final status"
    return RunStatus.from_json({**_known(folder), "state": "LOST", "reason": reason, "exit_code": 1})


def events(folder: RunFolder, *, after: int = 0) -> Iterator[Event]:
    """Events with a larger id than ``after``, from the journal.

    Raises:
        SystemCallError: The journal exists and cannot be read.
    """
    if not folder.journal.is_file():
        return
    import sqlite3  # of an ended run alone

    try:
        # mode=ro still honours the write-ahead log of a controller that died.
        journal = sqlite3.connect(f"file:{quote(str(folder.journal))}?mode=ro", uri=True, timeout=5.0)
        with contextlib.closing(journal):
            rows = journal.execute("SELECT id, event FROM events WHERE id > ? ORDER BY id", (after,))
            for number, body in rows:
                yield Event.from_json({**json.loads(body), "id": number})
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise SystemCallError(f"the journal {folder.journal} cannot be read: {error}") from error


def _require_known(folder: RunFolder, selection: Selection) -> None:
    """Refuse a process that the job does not have."""
    job = folder.job
    for what, value, count in (
        ("replica", selection.replica, job.get("replicas")),
        ("rank", selection.rank, job.get("ranks_per_replica")),
    ):
        if value is not None and isinstance(count, int) and value >= count:
            raise ConfigError(f"this run has no {what} {value}", hint=f"it has 0 to {count - 1}")


def _chunks(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # rotated away meanwhile
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _split(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines of a byte stream; one that spans two segments stays whole, one without an end counts."""
    pending = bytearray()
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            pending += line
            yield pending.decode(errors="replace")
            pending.clear()
        pending += rest
    if pending:
        yield pending.decode(errors="replace")


def log_lines(folder: RunFolder, selection: Selection, *, tail: int | None = None) -> Iterator[LogLine]:
    """Lines of captured output, slot by slot; of each slot the last ``tail``."""
    _require_known(folder, selection)
    for slot, replica, rank in selection.slots(folder.path):
        lines = (
            LogLine(replica=replica, rank=rank, generation=generation, line=line)
            for generation, files in selection.segments(slot)
            for line in _split(_chunks(files))
        )
        yield from lines if tail is None else deque(lines, maxlen=tail)


def log_bytes(folder: RunFolder, selection: Selection) -> Iterator[bytes]:
    """The exact bytes that the selected process wrote."""
    _require_known(folder, selection)
    for slot, _, _ in selection.slots(folder.path):
        for _, files in selection.segments(slot):
            yield from _chunks(files)


def skip_bytes(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    """The stream without its first ``count`` bytes."""
    for chunk in chunks:
        if count >= len(chunk):
            count -= len(chunk)
            continue
        yield chunk[count:]
        count = 0
