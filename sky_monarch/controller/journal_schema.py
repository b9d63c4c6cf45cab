"""The tables of a journal, how older ones become newer ones, and what is none."""

from __future__ import annotations

import sqlite3

from sky_monarch.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "damaged", "prepare"]

_EVENTS = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    wall_ms INTEGER NOT NULL,
    kind TEXT NOT NULL,
    incarnation TEXT,
    seq INTEGER,
    event TEXT NOT NULL,
    UNIQUE (incarnation, seq)
) STRICT
"""
# What all events up to `through` have led to.
_SUMMARY = """
CREATE TABLE summary (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    through INTEGER NOT NULL,
    document TEXT NOT NULL
) STRICT
"""
# Highest sequence numbers of agents whose events have been dropped.
_AGENTS = """
CREATE TABLE agents (
    incarnation TEXT PRIMARY KEY,
    seq INTEGER NOT NULL
) STRICT, WITHOUT ROWID
"""
#: What turns each version into the next one; version 0 is an empty file.
_STEPS: tuple[tuple[str, ...], ...] = ((_EVENTS,), (_SUMMARY, _AGENTS))

SCHEMA_VERSION = len(_STEPS)

_DAMAGES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def damaged(error: BaseException) -> bool:
    """Whether an error says that the file is no journal, now or ever; others may pass."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return False  # of the module, not of the library
    return code & 0xFF in _DAMAGES or code == sqlite3.SQLITE_ERROR  # a table is missing, or not ours


def prepare(db: sqlite3.Connection, path: str) -> None:
    """Make the tables, or bring those of an older version up to date: all of it or nothing.

    Raises:
        ConfigError: A newer version wrote it; it is left as it is.
        sqlite3.Error: It cannot be used.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version < 0 or version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema {version}, this sky-monarch knows 1 to {SCHEMA_VERSION}",
            hint="use the sky-monarch that started the run, or a newer one",
        )
    db.execute("PRAGMA journal_mode = WAL")
    if version == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        for step in _STEPS[version:]:
            for statement in step:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
