"""What the folder of a run says of it, at any moment of its life and whatever became of its files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sky_monarch.cli import app
from sky_monarch.errors import LaunchError, SystemCallError
from sky_monarch.launch import local
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.launch.process import Process


def a_run(state: Path, **info: Any) -> RunFolder:
    folder = RunFolder(state / "runs" / "demo-20261130-120000-abcd")
    folder.path.mkdir(parents=True)
    (folder.path / "run.json").write_text(json.dumps({"name": "demo", **info}))
    return folder


@pytest.mark.parametrize("head", [None, "demo-head"])
def test_a_run_whose_launcher_is_done_while_somebody_looks_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str | None
) -> None:
    me = Process.of(os.getpid())
    assert me is not None
    launcher = {"launcher_pid": me.pid, "launcher_start_ticks": me.start_ticks}
    folder = a_run(tmp_path, **launcher, **({"head": head} if head else {}))

    def look(self: RunFolder) -> None:
        # Nothing is found, and a moment later the launcher writes down what it has started.
        (self.path / f"{self.supervisor}.pid").write_text("{}")

    monkeypatch.setattr(RunFolder, "agent", look)
    assert folder.phase() is Phase.LAUNCHING


def test_a_run_that_does_not_say_when_it_began_has_no_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path)
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path))

    def lasted() -> str:
        header, row = CliRunner().invoke(app, ["status", "--all"]).stdout.splitlines()
        return row[header.index("LASTED") : header.index("RUN")].strip()

    assert lasted() == "-"
    local.finish(folder, state="FAILED", reason="its agent died", exit_code=1)
    assert lasted() == "-"


def test_a_run_whose_end_cannot_be_written_keeps_no_secrets_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path)
    (folder.path / "private.json").write_text("{}")
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(path: Path, _: object) -> None:
        if (folder.path / "private.json").exists() or is_full:
            raise full

    monkeypatch.setattr(local, "write_json", write)
    is_full = True
    with pytest.raises(
        SystemCallError, match=f"{folder.run_id} is over, .*: No space left on device"
    ) as raised:
        local.finish(folder, state="CANCELLED", reason="down", exit_code=8)
    assert "make room" in str(raised.value.hint)
    assert not (folder.path / "private.json").exists()

    is_full = False
    (folder.path / "private.json").write_text("{}")  # what goes leaves room enough
    assert local.finish(folder, state="CANCELLED", reason="down", exit_code=8)["exit_code"] == 8


def test_a_launch_onto_a_disk_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=200 * 1024))
    with pytest.raises(LaunchError, match="has 200 KiB left") as raised:
        local._require_room(tmp_path)
    assert "SKY_MONARCH_STATE_DIR" in str(raised.value.hint)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**30))
    local._require_room(tmp_path)
