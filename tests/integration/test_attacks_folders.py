"""Run folders that somebody or something damaged, removed or filled up."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import sky_monarch as sm
from sky_monarch.errors import SkyMonarchError, SystemCallError
from sky_monarch.launch import local
from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.plan import plan_local
from tests.support.processes import is_alive
from tests.support.runs import Workbench, pid_of
from tests.support.waiting import eventually

RUN = {"name": "x", "created_ms": 1}
DAMAGED = {
    "no-json": {"run.json": "not json"},
    "empty": {"run.json": ""},
    "list": {"run.json": "[1]"},
    "deep": {"run.json": "[" * 100_000},
    "wrong-types": {"run.json": '{"name": ["x"], "created_ms": "abc", "infra": 5}'},
    "far-future": {"run.json": '{"name": "x", "created_ms": 1e300}'},
    "farther-future": {"run.json": '{"name": "x", "created_ms": 99999999999999999999}'},
    "sockets": {"run.json": '{"name": "x", "sockets": [1, 2]}'},
    "socket-numbers": {"run.json": '{"name": "x", "sockets": {"api": 5}}'},
    "launcher": {"run.json": '{"name": "x", "launcher_pid": "x", "created_ms": null}'},
    "agent-pid": {"run.json": RUN, "agent.pid": '{"pid": "x", "start_ticks": []}'},
    "private": {"run.json": RUN, "private.json": '{"token": 7}'},
    "final-empty": {"run.json": RUN, "final.json": ""},
    "final-blank": {"run.json": RUN, "final.json": "{}"},
    "final-wrong": {"run.json": RUN, "final.json": '{"state": 5, "groups": {"a": 1}, "recoveries": 7}'},
    "final-keys": {"run.json": RUN, "final.json": '{"state": "FAILED", "groups": [{}], "setup": 3}'},
    "journal": {"run.json": RUN, "final.json": '{"state": "FAILED"}', "journal.db": "garbage" * 500},
    "logs": {"run.json": RUN, "final.json": '{"state": "FAILED"}', "logs": "a file"},
    "slot": {"run.json": RUN, "final.json": '{"state": "FAILED"}', "logs/r0-0": "a file"},
    "segment": {"run.json": RUN, "final.json": '{"state": "FAILED"}', "logs/r0-0/g1-0.log/x": ""},
}


def error_of(read: Callable[[str], Iterable[object]], run_id: str) -> str:
    """What reading to the end fails with; the folder's own name where it does not."""
    try:
        list(read(run_id))
    except (SkyMonarchError, OSError) as error:
        return str(error)
    return str(sm.attach(run_id).folder.path)


def damage(runs: Path) -> dict[str, Path]:
    """One run folder for each entry of ``DAMAGED``."""
    folders = {}
    for name, files in DAMAGED.items():
        folders[name] = folder = runs / f"{name}-20260101-000000-0000"
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    (runs / "half-made-20260101-000000-0000").mkdir()
    return folders


def test_a_damaged_run_folder_hides_no_other_run_and_can_be_looked_at_and_ended(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(workbench.home))
    folders = damage(workbench.home / "runs")
    listed = {run.run_id for run in sm.runs(ended=True)}
    assert listed == {folder.name for folder in folders.values()}
    for name, folder in folders.items():
        status = sm.status(folder.name)
        assert status.run_id == folder.name, name
        assert status.ended, name
        for read in (sm.events, sm.logs):
            assert str(folder) in error_of(read, folder.name), "an error names what is broken"
        assert sm.down(folder.name).ended, name
    shown = workbench.cli("status", "--all")
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 1 + len(folders)


def test_up_works_beside_damaged_run_folders(workbench: Workbench) -> None:
    damage(workbench.home / "runs")
    done = workbench.cli("up", str(workbench.job("x", run="true", replicas=1)))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_whose_folder_was_removed_is_still_listed_keeps_its_name_and_can_be_ended(
    workbench: Workbench,
) -> None:
    job = workbench.job("bereft", run="sleep 300", replicas=1)
    name = workbench.up(job)
    before = eventually(lambda: (now := workbench.status(name)) and pid_of(now, 0) and now)
    # At once: its processes go on writing to what is still there.
    workbench.run_folder(name).rename(workbench.folder / "removed")
    shutil.rmtree(workbench.folder / "removed", ignore_errors=True)

    (listed,) = json.loads(workbench.cli("status", "--json").stdout)
    assert (listed["run_id"], listed["state"]) == (before["run_id"], "LOST")
    assert "removed" in listed["reason"]
    again = workbench.cli("up", str(job), "--detach")
    assert again.returncode == 7, again.stdout + again.stderr
    assert "removed" in again.stderr
    ended = workbench.cli("down", name)
    assert ended.returncode == 0, ended.stderr
    assert not is_alive(before["agent_pid"])
    assert not is_alive(pid_of(before, 0))
    assert workbench.cli("status", name).returncode == 6


def test_secrets_are_removed_also_where_no_final_status_can_be_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x-20260101-000000-0000")
    folder.path.mkdir()
    (folder.path / "private.json").write_text('{"token": "canary"}')
    (folder.path / "final.json").mkdir()  # as good as a full disk: nothing can be written there
    with pytest.raises(SystemCallError, match=f"cannot be written to {folder.path}: Is a directory"):
        local.finish(folder, state="FAILED", reason="test", exit_code=1)
    assert not (folder.path / "private.json").exists()


def test_a_state_folder_that_cannot_be_used_is_named_with_a_way_out(workbench: Workbench) -> None:
    workbench.home.write_text("in the way")
    done = workbench.cli("up", str(workbench.job("x", run="true")))
    assert done.returncode == 1
    assert str(workbench.home) in done.stderr
    assert "SKY_MONARCH_STATE_DIR" in done.stderr
    assert "internal error" not in done.stderr


def test_a_state_folder_whose_name_is_no_text_is_refused(workbench: Workbench) -> None:
    workbench.env["SKY_MONARCH_STATE_DIR"] = os.fsdecode(b"/tmp/\xff")
    done = workbench.cli("up", str(workbench.job("x", run="true")))
    assert done.returncode == 2
    assert "SKY_MONARCH_STATE_DIR is not valid UTF-8" in done.stderr


def test_sockets_find_a_place_where_state_and_temporary_folder_are_both_too_long(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    plan = plan_local(
        {"name": "x", "replicas": 1},
        {},
        run_id="x-20260101-000000-0000",
        state=deep,
        temporary=deep / "t",
        python="python",
        version="0",
        token="f00d" * 16,
        base_env={},
    )
    assert len(os.fsencode(plan.socket_dir / "controller.sock")) < 104
    assert "f00d" not in str(plan.socket_dir), "a path that everybody sees holds no part of the token"


def test_a_run_works_in_a_state_folder_of_an_odd_name(workbench: Workbench) -> None:
    workbench.home = workbench.folder / "st ate ünï ' \" % ?x#"
    workbench.env["SKY_MONARCH_STATE_DIR"] = str(workbench.home)
    done = workbench.cli("up", str(workbench.job("odd", run="echo hello", replicas=1)))
    assert done.returncode == 0, done.stderr
    assert workbench.cli("logs", "odd").stdout == "[0/0] hello\n"
    assert workbench.events("odd")
