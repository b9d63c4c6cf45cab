"""Remembers everything that happened in a run: events with ids, in SQLite (WAL).

One process writes, any number read. A transaction that was committed survives the death of the process at any
instant; ``durable`` ones survive that of the machine too.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "Journal", "read_events"]

SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 5.0
_CHECKPOINT_EVERY = 500  # transactions
_LARGEST_LOG_PAGES = 16_384  # of 4 KiB
_SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    wall_ms INTEGER NOT NULL,
    kind TEXT NOT NULL,
    incarnation TEXT,
    seq INTEGER,
    event TEXT NOT NULL,
    UNIQUE (incarnation, seq)
) STRICT;
"""


class Journal:
    """The writing side of a journal. Not for use by several threads."""

    def __init__(self, path: Path) -> None:
        """Open the journal at ``path``, or make it.

        Raises:
            ConfigError: It is not a journal, or a newer sky-monarch wrote it.
        """
        self._path = path
        self._since_checkpoint = 0
        self._checkpointing: threading.Thread | None = None
        fresh = not path.exists()
        if fresh:
            path.touch(mode=0o600)
        self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(f"{path} is not a usable journal: {error}") from error
        except ConfigError:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        # A checkpoint waits for the disk. Deaths are not to wait for it: it is made on its own thread, and
        # here only where that one does not keep up.
        self._db.execute(f"PRAGMA wal_autocheckpoint = {_LARGEST_LOG_PAGES}")
        self._db.execute("BEGIN IMMEDIATE")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._db.execute("COMMIT")
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path} has schema {version}, this sky-monarch knows {SCHEMA_VERSION}",
                hint="use the sky-monarch that started the run, or a newer one",
            )
        (last_id,) = self._db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        self._last_id = int(last_id)

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0 where there is none."""
        return self._last_id

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Make the appends inside one: all of them are stored, or none.

        Args:
            durable: Return only once the disk has it, so that even a power cut does not take it back.
        """
        # WAL with NORMAL loses nothing when the process dies: what it wrote is the kernel's already.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        before = self._last_id
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            self._last_id = before
            raise
        self._db.execute("COMMIT")
        self._since_checkpoint += 1
        if self._since_checkpoint >= _CHECKPOINT_EVERY:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Move what is committed from the log into the database, in the background and one at a time."""
        if self._checkpointing is not None and self._checkpointing.is_alive():
            return
        self._since_checkpoint = 0

        def move() -> None:
            # What fails now (a full disk) is tried again later; until then the log just grows.
            with suppress(sqlite3.Error), closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")

        self._checkpointing = threading.Thread(target=move, name="checkpoint", daemon=True)
        self._checkpointing.start()

    def append(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Store one event; inside :meth:`transaction` only.

        Args:
            event: Has ``event`` and ``wall_ms``; one with ``incarnation`` and ``seq`` is stored once.

        Returns:
            The event with its ``id``; None where it was stored before.
        """
        incarnation = event.get("incarnation") if "seq" in event else None
        row = self._db.execute(
            "INSERT INTO events (wall_ms, kind, incarnation, seq, event) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (incarnation, seq) DO NOTHING RETURNING id",
            (
                event["wall_ms"],
                event["event"],
                None if incarnation is None else str(incarnation),
                event.get("seq"),
                json.dumps(event, separators=(",", ":")),
            ),
        ).fetchone()
        if row is None:
            return None
        self._last_id = row[0]
        return _with_id(row[0], event)

    def last_seq(self, incarnation: int) -> int:
        """Highest sequence number stored of an agent; 0 where there is none."""
        query = "SELECT coalesce(max(seq), 0) FROM events WHERE incarnation = ?"
        (seq,) = self._db.execute(query, (str(incarnation),)).fetchone()
        return int(seq)

    def read(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The first ``limit`` events with an id above ``after``, in order."""
        return _read(self._db, after, limit)

    def close(self) -> None:
        """Close the file; the journal cannot be used any more."""
        if self._checkpointing is not None:
            self._checkpointing.join(_BUSY_TIMEOUT_S)
        self._db.close()


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
