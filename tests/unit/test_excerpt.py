"""The excerpt of a run: bounded, with the newest in it, and read back as it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sky_monarch.controller.journal import Journal
from sky_monarch.launch.excerpt import keep, kept
from sky_monarch.launch.folder import RunFolder


def test_of_more_events_than_are_kept_the_newest_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sky_monarch.launch.excerpt._EVENTS_BYTES", 100_000)
    (tmp_path / "private.json").write_text(json.dumps({"token": "t0ken-of-this-run"}))
    journal = Journal(tmp_path / "journal.db")
    for number in range(24):
        with journal.transaction():
            journal.append({"event": "notice", "wall_ms": number, "message": "x" * (10_000)})
    with journal.transaction():
        journal.append({"event": "run_ended", "wall_ms": 99, "state": "FAILED"})
    journal.close()
    folder = RunFolder(tmp_path)
    keep(folder)
    found = kept(folder)
    assert found is not None
    members, notes = found
    events = [json.loads(line) for line in members["events.ndjson"].splitlines()]
    assert events[-1] == {"id": 25, "event": "run_ended", "wall_ms": 99, "state": "FAILED"}
    assert [event["id"] for event in events] == list(range(events[0]["id"], 26))
    assert 1 < len(events) < 25
    assert "begins here" in notes["events.ndjson"]
