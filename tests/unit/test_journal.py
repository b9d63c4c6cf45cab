"""The journal: stored once, read by many, whole after any death."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from sky_monarch.controller.journal import SCHEMA_VERSION, Journal, read_events
from sky_monarch.controller.rebuild import open_journal
from sky_monarch.errors import ConfigError
from tests.support.disk import FULL, disk_environment
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
    before = path.read_bytes()
    for opens in (Journal, open_journal):
        with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}") as refused:
            opens(path)
        assert "newer" in (refused.value.hint or "")
    assert path.read_bytes() == before


V1 = """
PRAGMA journal_mode = WAL;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    wall_ms INTEGER NOT NULL,
    kind TEXT NOT NULL,
    incarnation TEXT,
    seq INTEGER,
    event TEXT NOT NULL,
    UNIQUE (incarnation, seq)
) STRICT;
INSERT INTO events (wall_ms, kind, incarnation, seq, event)
    VALUES (1, 'notice', '7', 4, '{"event":"notice","wall_ms":1,"incarnation":7,"seq":4}');
PRAGMA user_version = 1;
"""


def test_a_journal_of_the_first_version_is_brought_up_to_date_with_all_it_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(V1)
    journal = Journal(path)
    assert [event["seq"] for event in journal.read()] == [4]
    assert journal.last_seq(7) == 4
    with journal.transaction():
        assert journal.append(notice(incarnation=7, seq=4)) is None
        assert journal.append(notice(incarnation=7, seq=5)) is not None
    journal.compact({"sum": 5})
    journal.close()
    again = Journal(path)
    assert again.summary() == (2, {"sum": 5})
    assert len(again.read()) == 2
    again.close()


@pytest.mark.parametrize("content", [b"hello " * 1000, b"", b"SQLite format 3\0" + b"\xff" * 4096])
def test_what_is_no_journal_is_set_aside_for_a_fresh_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    journal, lost = open_journal(path)
    with journal.transaction():
        journal.append(notice())
    assert len(read_events(path)) == 1
    journal.close()
    if content:
        assert "journal.db.damaged" in str(lost)
        assert (tmp_path / "journal.db.damaged").read_bytes() == content
    else:
        assert lost is None, "an empty file is what a controller leaves that dies before its first event"


def test_a_journal_without_its_table_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE events")
    with pytest.raises(ConfigError, match="not a readable journal"):
        read_events(path)
    journal, lost = open_journal(path)
    journal.close()
    assert "no such table" in str(lost)


def test_a_journal_is_bounded_and_readers_are_told_what_they_missed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path, keep_events=100)
    reader_at, seen = 0, []
    sizes = []
    for turn in range(40):
        with journal.transaction():
            for number in range(50):
                journal.append(notice(incarnation=3, seq=50 * turn + number + 1, text="x" * 200))
        journal.compact({"turn": turn})
        with closing(
            sqlite3.connect(path)
        ) as other:  # what is in the log counts too: a checkpoint comes when it comes
            sizes.append(other.execute("PRAGMA page_count").fetchone()[0])
        if turn % 3 == 0:  # a follower that is now and then too slow
            page = journal.read(reader_at, 10_000)
            assert page[-1]["id"] == journal.last_id
            seen += page
            reader_at = page[-1]["id"]
    ids = [event["id"] for event in seen]
    assert ids == sorted(set(ids))
    for before, after in pairwise(seen):
        gap = after["id"] - before["id"] > 1
        assert gap == (after["event"] == "events_dropped"), "whoever missed something is told, nobody else"
    assert len(journal.read(0, 10_000)) == 101
    assert journal.read()[0] == {**journal.read()[0], "event": "events_dropped", "through": 1900}
    assert max(sizes[20:]) <= 1.2 * max(sizes[:8]), "pages of dropped events are used again"
    journal.close()
    again = Journal(path, keep_events=100)
    assert again.summary() == (2000, {"turn": 39})
    assert again.last_seq(3) == 2000
    with again.transaction():
        assert again.append(notice(incarnation=3, seq=7)) is None, "stored once, though it was dropped since"
        assert again.append(notice())["id"] == 2001
    again.close()


def test_large_events_are_bounded_by_their_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", keep_bytes=100_000)
    due = 0
    for _ in range(200):
        with journal.transaction():
            journal.append(notice(text="x" * 10_000))
        if journal.summary_due:
            due += 1
            journal.compact({})
        assert sum(len(event["text"]) for event in journal.read() if "text" in event) <= 125_000
    assert due < 120
    journal.close()


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
    for number in range(300):
        with journal.transaction():
            journal.append(notice())
        if number == 150:  # the rest is written while they read, however late they have begun
            eventually(lambda: max(counts, default=0) > 0, what="somebody has read")
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
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
        numbers = [event["number"] for event in read_events(path, limit=10_000_000)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= said
        assert len(numbers) % 3 == 0, "a transaction is stored whole or not at all"


@pytest.mark.parametrize("how", ["whole", "torn"])
def test_killed_before_or_within_any_operation_on_its_disk_it_has_all_that_was_acked(
    tmp_path: Path, how: str
) -> None:
    """Each write, sync and truncation of a life with a migration, compactions and checkpoints, in turn."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "old.db")) as old:
        old.executescript(V1)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.journal_writer", str(folder), how],
        env={**os.environ, **disk_environment(folder, tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lives = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert len(lives) > 20, "the last life came to its end"
    for nth, said, stored, whole in lives:
        assert stored >= said, f"killed at operation {nth}: acked and gone"
        assert whole, f"killed at operation {nth}: half a transaction"


def test_on_a_full_disk_events_are_held_in_order_and_written_once_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder / "journal.db"), str(folder / FULL)],
        env={**os.environ, **disk_environment(folder, tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [event["number"] for event in read_events(folder / "journal.db")] == list(range(40))


FULL_DISK = """
import sys, time
from pathlib import Path
from sky_monarch.controller.journal import Journal
from sky_monarch.errors import SystemCallError
path, full = map(Path, sys.argv[1:])
journal = Journal(path, keep_events=30)
for number in range(40):
    if number == 10:
        full.touch()
    if number == 30:
        assert journal.behind and "full" in journal.trouble, journal.trouble
        assert [event["number"] for event in journal.read()] == list(range(30)), "readers see what is held"
        assert not journal.retry() and not journal.summary_due
        full.unlink()
        time.sleep(1.0)
        assert journal.retry() and journal.trouble is None
    with journal.transaction():
        journal.append({"event": "notice", "wall_ms": 1, "number": number, "text": "x" * 5000})
full.touch()
try:
    for number in range(40):
        with journal.transaction():
            journal.append({"event": "notice", "wall_ms": 1, "number": 40, "text": "x" * 5000})
except SystemCallError as error:
    assert "make room" in error.hint
else:
    raise AssertionError("what is held is bounded")
"""
