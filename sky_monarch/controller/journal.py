"""Remembers everything that happened in a run: events with ids, in SQLite (WAL).

One process writes, any number read. A transaction that was committed survives the death of the process at any
instant; ``durable`` ones survive that of the machine too. Where the disk takes nothing (it is full), events are
held in memory and written once it does: until then the journal is ``behind``, and nobody is told that they are
stored.

It does not grow for ever: the controller hands it a summary of all that its events have led to now and then, and
the oldest events go. One event in their place says so; ids are never given twice.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sky_monarch.controller.journal_schema import SCHEMA_VERSION, damaged, prepare
from sky_monarch.errors import ConfigError, SystemCallError

__all__ = [
    "COMPACT_EVERY",
    "KEEP_BYTES",
    "KEEP_EVENTS",
    "SCHEMA_VERSION",
    "Journal",
    "damaged_name",
    "read_events",
    "set_aside",
]

KEEP_EVENTS = 50_000
"""Events that stay for readers; between two summaries :data:`COMPACT_EVERY` more."""
KEEP_BYTES = 64 * 1024 * 1024
"""Text of events that stays for readers; between two summaries an eighth more."""
COMPACT_EVERY = 5_000
"""Events after which a summary is due."""

_BUSY_TIMEOUT_S = 5.0
_CHECKPOINT_EVERY = 500  # transactions
_LARGEST_LOG_PAGES = 16_384  # of 4 KiB
_RETRY_S = 1.0
_INSERT = "INSERT INTO events (id, wall_ms, kind, incarnation, seq, event) VALUES (?, ?, ?, ?, ?, ?)"

_Row = tuple[int, int, str, str | None, int | None, str]


class Journal:
    """The writing side of a journal. Not for use by several threads.

    Args:
        path: The file; made where there is none.
        keep_events: Events that stay when a summary is stored.
        keep_bytes: Text of events that stays then.
        alone: Nobody else can read the file while it is open. Then none is needed beside it that other
            processes share: a full disk may have no room for that one.

    Raises:
        ConfigError: A newer sky-monarch wrote it.
        sqlite3.Error: It cannot be opened; :func:`~.journal_schema.damaged` says whether it ever can.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        keep_events: int = KEEP_EVENTS,
        keep_bytes: int = KEEP_BYTES,
        alone: bool = False,
    ) -> None:
        self.path = path
        self._alone = alone
        self._keep_events = keep_events
        self._keep_bytes = keep_bytes
        self._since_checkpoint = 0
        self._checkpointing: threading.Thread | None = None
        self._batch: list[_Row] = []
        self._held: list[_Row] = []
        self._held_bytes = 0
        self._tried_s = 0.0
        self._seqs: dict[int, int] = {}
        self.trouble: str | None = None
        """Why it is behind."""
        if path is not None and not path.exists():
            path.touch(mode=0o600)
        self._db = sqlite3.connect(path or ":memory:", timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            # A checkpoint waits for the disk. Deaths are not to wait for it: it is made on its own thread, and
            # here only where that one does not keep up.
            self._db.execute(f"PRAGMA wal_autocheckpoint = {_LARGEST_LOG_PAGES}")
            if alone:
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            prepare(self._db, str(path))
            query = "SELECT coalesce(max(id), 0), coalesce(sum(length(event)), 0) FROM events"
            newest, length = self._db.execute(query).fetchone()
        except BaseException:
            self._db.close()
            raise
        self._last_id = self._summed_id = int(newest)
        self._bytes = self._summed_bytes = int(length)

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0 where there is none."""
        return self._last_id

    def begin_after(self, number: int) -> None:
        """Give the first event an id above this one: those up to it may be in a journal that is lost.

        Raises:
            ValueError: There are events already.
        """
        if self._last_id:
            raise ValueError(f"the journal has events up to {self._last_id}")
        self._last_id = self._summed_id = number

    @property
    def behind(self) -> bool:
        """Whether events are held in memory because the disk does not take them."""
        return bool(self._held)

    # --- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Make the appends inside one: all of them are stored, or none.

        Args:
            durable: Return only once the disk has it, so that even a power cut does not take it back.

        Raises:
            SystemCallError: The disk takes nothing, and more is held than is good.
            sqlite3.DatabaseError: The file is damaged: it was set aside, the next process starts another one.
        """
        before, seqs = self._last_id, dict(self._seqs)
        try:
            yield
        except BaseException:
            self._batch.clear()
            self._last_id, self._seqs = before, seqs
            raise
        batch, self._batch = self._batch, []
        if self._held and time.monotonic() - self._tried_s < _RETRY_S:
            self._hold(batch)
        else:
            self._write(batch, durable=durable)

    def append(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Store one event; inside :meth:`transaction` only.

        Args:
            event: Has ``event`` and ``wall_ms``; one with ``incarnation`` and ``seq`` is stored once, and after
                it none of that agent with a lower number.

        Returns:
            The event with its ``id``; None where it was stored before.
        """
        incarnation, seq = None, event.get("seq")
        if seq is not None and "incarnation" in event:
            number = int(event["incarnation"])
            if seq <= self.last_seq(number):
                return None
            incarnation, self._seqs[number] = str(number), seq
        self._last_id += 1
        text = json.dumps(event, separators=(",", ":"))
        stamp = (self._last_id, event["wall_ms"], event["event"])
        self._batch.append((*stamp, incarnation, None if incarnation is None else seq, text))
        return _with_id(self._last_id, event)

    def retry(self) -> bool:
        """Write what is held, if it is time for another try.

        Returns:
            Whether nothing is held any more.
        """
        if self._held and time.monotonic() - self._tried_s >= _RETRY_S:
            self._write([], durable=True)
        return not self._held

    def _write(self, batch: list[_Row], *, durable: bool) -> None:
        # WAL with NORMAL loses nothing when the process dies: what it wrote is the kernel's already.
        db = self._db
        try:
            db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            if self._held:  # the disk may have taken them without saying so
                db.executemany(_INSERT.replace("INSERT", "INSERT OR IGNORE", 1), self._held)
            db.executemany(_INSERT, batch)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if damaged(error):
                self.set_aside()
                raise
            if not isinstance(error, sqlite3.OperationalError):
                raise  # somebody else writes this journal
            self.trouble, self._tried_s = str(error), time.monotonic()
            self._hold(batch)
            return
        self._bytes += sum(len(row[-1]) for row in batch) + self._held_bytes
        self._held, self._held_bytes, self.trouble = [], 0, None
        self._since_checkpoint += 1
        if self._since_checkpoint >= _CHECKPOINT_EVERY:
            self._checkpoint()

    def _hold(self, batch: list[_Row]) -> None:
        self._held += batch
        self._held_bytes += sum(len(row[-1]) for row in batch)
        if len(self._held) > self._keep_events or self._held_bytes > self._keep_bytes:
            # Agents have all of theirs still. Whoever comes next begins with what the disk has.
            raise SystemCallError(
                f"{len(self._held)} events cannot be written to {self.path}: {self.trouble}",
                hint="make room on that disk",
            )

    def _checkpoint(self) -> None:
        """Move what is committed from the log into the database, in the background and one at a time."""
        path = self.path
        if (
            path is None
            or self._alone
            or (self._checkpointing is not None and self._checkpointing.is_alive())
        ):
            return
        self._since_checkpoint = 0

        def move() -> None:
            # What fails now (a full disk) is tried again later; until then the log just grows.
            with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")

        self._checkpointing = threading.Thread(target=move, name="checkpoint", daemon=True)
        self._checkpointing.start()

    # --- bounds -------------------------------------------------------------------------------------------

    @property
    def summary_due(self) -> bool:
        """Whether :meth:`compact` should be called; never while it is behind."""
        grown = self._bytes - self._summed_bytes > self._keep_bytes // 8
        return not self._held and (grown or self._last_id - self._summed_id >= COMPACT_EVERY)

    def compact(self, summary: Mapping[str, Any]) -> None:
        """Store what all events so far have led to, and drop the oldest ones beyond the bounds.

        Args:
            summary: What :meth:`summary` is to give back; JSON values.
        """
        db, wall_ms = self._db, time.time_ns() // 1_000_000
        text = json.dumps(summary, separators=(",", ":"))
        removed = 0
        self._summed_id = self._last_id  # also where it fails: it is tried again later, not at every event
        try:
            db.execute("BEGIN IMMEDIATE")
            through, freed = self._to_drop()
            if through:
                db.execute(
                    "INSERT INTO agents (incarnation, seq) SELECT incarnation, max(seq) FROM events"
                    " WHERE id <= ? AND incarnation IS NOT NULL GROUP BY incarnation"
                    " ON CONFLICT (incarnation) DO UPDATE SET seq = max(seq, excluded.seq)",
                    (through,),
                )
                db.execute("DELETE FROM events WHERE id <= ?", (through,))
                dropped = {"wall_ms": wall_ms, "event": "events_dropped", "through": through}
                note = json.dumps(dropped, separators=(",", ":"))
                db.execute(_INSERT, (through, wall_ms, "events_dropped", None, None, note))
                removed = freed - len(note)
            query = "INSERT OR REPLACE INTO summary (one, through, document) VALUES (1, ?, ?)"
            db.execute(query, (self._last_id, text))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if damaged(error):
                self.set_aside()
                raise
            return
        self._bytes -= removed
        self._summed_bytes = self._bytes
        self._checkpoint()

    def _to_drop(self) -> tuple[int, int]:
        """Up to which id events are to go (0: none), and the length of their text."""
        through, freed = 0, 0
        rows = self._db.execute("SELECT id, length(event), kind FROM events ORDER BY id")
        for number, length, kind in rows:
            many = self._last_id - number >= self._keep_events
            if not many and self._bytes - freed <= self._keep_bytes:
                break
            freed += length
            through = 0 if through == 0 and kind == "events_dropped" else number
        return through, freed

    def summary(self) -> tuple[int, dict[str, Any]] | None:
        """The newest summary, and the id of the last event that it covers."""
        row = self._db.execute("SELECT through, document FROM summary").fetchone()
        return None if row is None else (row[0], json.loads(row[1]))

    # --- reading ------------------------------------------------------------------------------------------

    def last_seq(self, incarnation: int) -> int:
        """Highest sequence number stored of an agent; 0 where there is none."""
        known = self._seqs.get(incarnation)
        if known is None:
            query = (
                "SELECT max(coalesce((SELECT max(seq) FROM events WHERE incarnation = ?1), 0),"
                " coalesce((SELECT seq FROM agents WHERE incarnation = ?1), 0))"
            )
            known = int(self._db.execute(query, (str(incarnation),)).fetchone()[0])
            self._seqs[incarnation] = known
        return known

    def read(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The first ``limit`` events with an id above ``after``, in order."""
        found = _read(self._db, after, limit)
        if len(found) < limit and self._held:
            held = [row for row in self._held if row[0] > after][: limit - len(found)]
            found += [_with_id(row[0], json.loads(row[-1])) for row in held]
        return found

    # --- the end ------------------------------------------------------------------------------------------

    def set_aside(self) -> str | None:
        """Close it and give its files another name: what is damaged may still be of use to somebody.

        Returns:
            The new name; None where there is no file.
        """
        self.close()
        return None if self.path is None else set_aside(self.path)

    def close(self) -> None:
        """Close the file; the journal cannot be used any more."""
        if self._checkpointing is not None:
            self._checkpointing.join(_BUSY_TIMEOUT_S)
        self._db.close()


def damaged_name(path: Path) -> Path:
    """Where the file of a damaged journal is kept."""
    return path.with_name(f"{path.name}.damaged")


def set_aside(path: Path) -> str:
    """Give the files of a journal another name, which is returned; of several damaged ones the last is kept."""
    kept = damaged_name(path)
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(kept.with_name(kept.name + suffix))
    return kept.name


def read_events(path: Path, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """Read a journal that another process may be writing: events with an id above ``after``, in order.

    Raises:
        ConfigError: It is not a journal.
    """
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as db:
            return _read(db, after, limit)
    except sqlite3.Error as error:
        raise ConfigError(f"{path} is not a readable journal: {error}") from error


def _read(db: sqlite3.Connection, after: int, limit: int) -> list[dict[str, Any]]:
    rows = db.execute("SELECT id, event FROM events WHERE id > ? ORDER BY id LIMIT ?", (after, limit))
    return [_with_id(number, json.loads(event)) for number, event in rows]


def _with_id(number: int, event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with its place in the journal, which wins over a field of that name in the event."""
    return {"id": number, **event} | {"id": number}
