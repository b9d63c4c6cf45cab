"""The journal: stored once, read by many, whole after any death."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from sky_monarch.controller.journal import SCHEMA_VERSION, Journal, read_events
from sky_monarch.errors import ConfigError
from tests.support.waiting import eventually


@pytest.fixture
def journal(tmp_path: Path):
    opened = Journal(tmp_path / "journal.db")
    yield opened
    opened.close()


def notice(**fields):
    return {"event": "notice", "wall_ms": 5, **fields}


def test_events_come_back_in_order_with_their_ids(journal: Journal) -> None:
    with journal.transaction():
        for number in range(5):
            journal.append(notice(number=number))
    assert [(event["id"], event["number"]) for event in journal.read()] == [(n + 1, n) for n in range(5)]
    assert [event["number"] for event in journal.read(after=2, limit=2)] == [2, 3]
    assert journal.last_id == 5


def test_an_id_inside_an_event_never_takes_the_place_of_its_own(journal: Journal) -> None:
    with journal.transaction():
        journal.append(notice())
        stored = journal.append(notice(id=77))
    assert stored is not None
    assert [stored["id"], *(event["id"] for event in journal.read())] == [2, 1, 2]


def test_an_event_of_an_agent_is_stored_once(journal: Journal) -> None:
    huge = 2**64 - 1
    with journal.transaction():
        assert journal.append(notice(incarnation=huge, seq=1)) is not None
        assert journal.append(notice(incarnation=huge, seq=1)) is None
        assert journal.append(notice(incarnation=7, seq=1)) is not None
    assert journal.last_seq(huge) == 1
    assert journal.last_seq(3) == 0
    assert len(journal.read()) == 2


def test_a_transaction_that_fails_stores_nothing(journal: Journal) -> None:
    def fail() -> None:
        with journal.transaction():
            journal.append(notice())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert journal.read() == []
    assert journal.last_id == 0
    with journal.transaction(durable=True):
        journal.append(notice())
    assert journal.last_id == len(journal.read())


def test_it_opens_again_with_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first = Journal(path)
    with first.transaction():
        first.append(notice(text="é\n\"'"))
    first.close()
    assert path.stat().st_mode & 0o077 == 0
    second = Journal(path)
    assert second.read()[0]["text"] == "é\n\"'"
    with second.transaction():
        assert second.append(notice())["id"] == 2
    second.close()


def test_a_journal_of_a_newer_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}"):
        Journal(path)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("hello " * 1000)
    with pytest.raises(ConfigError, match="not a usable journal"):
        Journal(path)
    with pytest.raises(ConfigError, match="not a readable journal"):
        read_events(path)


def test_readers_and_the_writer_do_not_disturb_each_other(journal: Journal, tmp_path: Path) -> None:
    counts: list[int] = []
    failures: list[Exception] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                counts.append(len(read_events(tmp_path / "journal.db", limit=10_000)))
        except ConfigError as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        with journal.transaction():
            journal.append(notice())
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert max(counts) > 0
    assert len(read_events(tmp_path / "journal.db")) == 300


WRITER = """
import sys
from pathlib import Path
from sky_monarch.controller.journal import Journal
journal = Journal(Path(sys.argv[1]))
number = journal.last_id
while True:
    with journal.transaction():
        for _ in range(3):
            number += 1
            journal.append({"event": "notice", "wall_ms": 1, "number": number, "text": "x" * 500})
    print(number, flush=True)
"""


def test_the_log_is_moved_into_the_database_while_the_writer_goes_on(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sky_monarch.controller.journal._CHECKPOINT_EVERY", 20)
    database = tmp_path / "journal.db"
    for number in range(20):
        with journal.transaction():
            journal.append(notice(number=number))

    def moved() -> bool:
        # Immutable: what is only in the log is not seen, at first not even the table.
        with closing(sqlite3.connect(f"{database.as_uri()}?immutable=1", uri=True)) as alone:
            with suppress(sqlite3.DatabaseError):
                return alone.execute("SELECT count(*) FROM events").fetchone()[0] >= 20
            return False

    eventually(moved, what="the database has the events without its log")
    with journal.transaction():
        journal.append(notice(number=20))
    assert [event["number"] for event in read_events(database)] == list(range(21))


def test_a_killed_writer_loses_nothing_that_it_said_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for turn in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert writer.stdout is not None
        said = 0
        for _ in range(20 + 7 * turn):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
        writer.stdout.close()
        writer.wait(10)
        numbers = [event["number"] for event in read_events(path, limit=100_000)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= said
        assert len(numbers) % 3 == 0, "a transaction is stored whole or not at all"
