"""The journal of a live run is damaged, gone, or on a full disk: the run goes on, and says so."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.controllers import ControllerRun, ScriptedAgent, controller
from tests.support.disk import FULL, disk_environment
from tests.support.waiting import eventually


def trains(agent: ScriptedAgent, replicas: int = 3) -> None:
    agent.told("start_group", replicas)
    for replica in range(replicas):
        agent.start(replica)
        agent.commit(replica, 1, first=True)
    agent.all_acked()


def remove(journal: Path) -> None:
    for file in journal.parent.glob("journal.db*"):
        file.unlink()


def fill_with_noise(journal: Path) -> None:
    remove(journal)
    journal.write_bytes(bytes(range(256)) * 64)


def cut_short(journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal.with_name("journal.db-wal").unlink(missing_ok=True)
    with journal.open("r+b") as file:
        file.truncate(5000)


def break_a_row(journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as db:
        db.execute("UPDATE events SET event = substr(event, 5) WHERE kind = 'generation_started'")
        db.commit()


DAMAGES = [
    remove,
    pytest.param(fill_with_noise, marks=pytest.mark.slow),
    pytest.param(cut_short, marks=pytest.mark.slow),
    break_a_row,
]


def log_of(run: ControllerRun, replica: int, generation: int) -> None:
    """What an agent leaves behind of a generation."""
    folder = run.folder / "logs" / f"r{replica}-0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"g{generation}-000000000000.log").touch()


def notes(run: ControllerRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == kind]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_its_journal_a_run_goes_on_with_what_the_agents_know(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    recovery = {"max_restarts": 4, "window_s": 600}
    with controller(tmp_path, replicas=4, min_replicas=1, recovery=recovery) as run:
        agent = ScriptedAgent(run).connect()
        trains(agent, 4)
        agent.die(1, 1)
        agent.event("restart_scheduled", replica=1, generation=2, delay_s=0.0, restarts_left=3)
        agent.start(1, 2)
        agent.groups[1]["restarts"] = 3
        agent.groups[2] |= {"state": "given_up", "pids": {}}
        agent.groups[3] |= {"state": "done", "pids": {}}
        agent.all_acked()
        run.kill()
        agent.close()
        for replica, generation in enumerate((1, 2, 1, 1)):
            log_of(run, replica, generation)
        damage(run.folder / "journal.db")
        run.start()
        agent.connect()

        def adopted() -> dict[str, Any]:
            agent.pump()
            assert agent.commands == [], "what lives is adopted: nothing is started or stopped"
            status = run.status()
            assert [group["generation"] for group in status["groups"]] == [1, 2, 1, 1]
            assert [group["state"] for group in status["groups"]][2:] == ["GIVEN_UP", "DONE"]
            return status

        status = eventually(adopted)
        agent.pump(0.3)
        assert agent.commands == [], "what lives is adopted: nothing is started or stopped"
        assert status["groups"][1]["restarts_left"] == 1, "what was spent of the budget stays spent"
        (lost,) = notes(run, "journal_lost")
        assert lost["id"] == 1
        assert lost["generations"] == {"0": 1, "1": 2, "2": 1, "3": 1}
        kept = run.folder / "journal.db.damaged"
        assert kept.exists() == (damage is not remove)
        assert (kept.name in lost["reason"]) == kept.exists()
        # An agent that is a new one has none of them: what is started is a generation that there never was.
        agent.close()
        eventually(lambda: notes(run, "agent_disconnected"))
        agent.finish(0)
        successor = ScriptedAgent(run).connect()
        starts = successor.told("start_group", 2)
        assert [(start["replica"], start["generation"]) for start in starts] == [(0, 2), (1, 3)]
        for replica, generation in ((0, 2), (1, 3)):
            successor.start(replica, generation)
            successor.finish(replica, generation)
        successor.told("shutdown")
        assert run.final["state"] == "SUCCEEDED"
        assert "the journal was lost" in run.final["reason"]
        successor.close()


def test_a_run_that_ended_stays_ended_without_its_journal(tmp_path: Path) -> None:
    with controller(tmp_path) as run:
        agent = ScriptedAgent(run).connect()
        trains(agent)
        for replica in range(3):
            agent.finish(replica)
        agent.told("shutdown")
        final = run.final
        agent.commands.clear()
        run.kill()
        agent.close()
        remove(run.folder / "journal.db")
        run.start()
        agent.groups.clear()
        agent.connect()
        agent.told("shutdown")
        assert agent.commands == [], "nothing was started"
        assert run.status()["state"] == "SUCCEEDED"
        assert run.final == final
        agent.close()


@pytest.mark.parametrize("room", [True, False])
def test_a_run_whose_last_status_has_no_place_ends_all_the_same(tmp_path: Path, room: bool) -> None:
    folder = tmp_path / "run"
    with controller(tmp_path, env=disk_environment(folder, tmp_path)) as run:
        agent = ScriptedAgent(run).connect()
        trains(agent)
        pid = run.status()["controller_pid"]
        (folder / ".final.reserve").unlink()  # as where the disk was full before it could be made
        (folder / FULL).touch()
        (folder / "ship").mkdir()
        for replica in range(3):
            agent.finish(replica)
        eventually(lambda: not (folder / "ship").exists(), within_s=20)  # it makes room
        assert run.status()["controller_pid"] == pid, "another one would not know that it is over"
        if room:
            (folder / FULL).unlink()
        agent.told("shutdown")
        assert (folder / "final.json").exists() is room
        agent.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_on_a_full_disk_goes_on_to_its_end_and_loses_no_event(tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "run"
    with controller(tmp_path, env=disk_environment(folder, tmp_path)) as run:
        agent = ScriptedAgent(run).connect()
        trains(agent)
        acked = agent.acked
        (run.folder / FULL).touch()
        text = "x" * 2000
        for number in range(100):
            agent.event("notice", replica=None, message=f"{number} {text}")
        (behind,) = eventually(lambda: notes(run, "journal_behind"))
        assert "full" in behind["error"]
        agent.pump(0.3)
        stored = agent.acked
        assert stored < acked + 100, "what is not stored is not acked"
        if killed:  # so what is not stored is not lost
            run.kill()
            agent.close()
            run.start()
            agent.connect()
        for replica in range(3):
            agent.finish(replica)
        agent.told("shutdown")
        assert run.final["state"] == "SUCCEEDED", "its place was kept on the disk"
        (run.folder / FULL).unlink()
        agent.all_acked()
        texts = [event["message"].split()[0] for event in notes(run, "notice") if text in event["message"]]
        assert texts == [str(number) for number in range(100)]
        assert not notes(run, "journal_lost")
        run.close()
        with closing(sqlite3.connect(run.folder / "journal.db")) as db:
            assert db.execute("SELECT count(*) FROM events WHERE kind = 'notice'").fetchone() == (100,)
        agent.close()
