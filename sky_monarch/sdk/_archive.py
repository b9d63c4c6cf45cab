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
from sky_monarch.launch.output import missing_text
from sky_monarch.sdk.types import Event, LogLine, RunStatus

__all__ = ["Selection", "events", "final_status", "log_bytes", "log_lines", "skip_bytes", "status"]

_SEGMENT = re.compile(r"g(\d+)-(\d+)\.log")
_SLOT = re.compile(r"r(\d+)-(\d+)")
_SETUP = re.compile(r"setup|setup-.+")
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

    def slots(self, run: Path) -> list[tuple[Path, int | None, int | None]]:
        """Folders in a run's that match: ``(folder, replica, rank)`` in order; of each host's ``setup`` its own."""
        found: list[tuple[Path, int | None, int | None]] = []
        with contextlib.suppress(FileNotFoundError):
            for folder in sorted((run / "logs").iterdir()):
                if self.setup and _SETUP.fullmatch(folder.name):
                    found.append((folder, None, None))
                elif not self.setup and (match := _SLOT.fullmatch(folder.name)):
                    replica, rank = int(match[1]), int(match[2])
                    if self.replica in (None, replica) and self.rank in (None, rank):
                        found.append((folder, replica, rank))
        return sorted(found, key=lambda one: (one[1] or 0, one[2] or 0))

    def segments(self, folder: Path) -> list[tuple[int, list[tuple[int, Path]]]]:
        """Log files of one slot: ``(generation, [(offset, file), …] in order)``."""
        by_generation: dict[int, list[tuple[int, Path]]] = {}
        for path in folder.iterdir():
            if match := _SEGMENT.fullmatch(path.name):
                generation = int(match[1])
                if self.generation in (None, generation):
                    by_generation.setdefault(generation, []).append((int(match[2]), path))
        return [(generation, sorted(parts)) for generation, parts in sorted(by_generation.items())]


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


def _chunks(files: list[tuple[int, Path]]) -> Iterator[tuple[int, bytes]]:
    """The bytes of a stream, each piece with its offset."""
    for base, path in files:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # rotated away meanwhile
            offset = base
            while chunk := file.read(_CHUNK_BYTES):
                yield offset, chunk
                offset += len(chunk)


def _split(chunks: Iterator[tuple[int, bytes]]) -> Iterator[tuple[str, int]]:
    """Lines of a byte stream; one that spans two segments stays whole, one without an end counts.

    With each line comes for how many bytes it stands that are not there any more: 0, but where there is a gap.
    """
    pending, at = bytearray(), 0
    for offset, chunk in chunks:
        if (missing := offset - at) > 0:
            if pending:
                yield pending.decode(errors="replace"), 0
                pending.clear()
            yield missing_text(missing), missing
        at = offset + len(chunk)
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            pending += line
            yield pending.decode(errors="replace"), 0
            pending.clear()
        pending += rest
    if pending:
        yield pending.decode(errors="replace"), 0


def log_lines(folder: RunFolder, selection: Selection, *, tail: int | None = None) -> Iterator[LogLine]:
    """Lines of captured output, slot by slot; of each slot the last ``tail``."""
    _require_known(folder, selection)
    for slot, replica, rank in selection.slots(folder.path):
        lines = (
            LogLine(replica=replica, rank=rank, generation=generation, line=line, missing_bytes=missing)
            for generation, files in selection.segments(slot)
            for line, missing in _split(_chunks(files))
        )
        yield from lines if tail is None else deque(lines, maxlen=tail)


def log_bytes(folder: RunFolder, selection: Selection) -> Iterator[bytes]:
    """The exact bytes that the selected process wrote."""
    _require_known(folder, selection)
    for slot, _, _ in selection.slots(folder.path):
        for _, files in selection.segments(slot):
            for _, chunk in _chunks(files):
                yield chunk


def skip_bytes(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    """The stream without its first ``count`` bytes."""
    for chunk in chunks:
        if count >= len(chunk):
            count -= len(chunk)
            continue
        yield chunk[count:]
        count = 0
