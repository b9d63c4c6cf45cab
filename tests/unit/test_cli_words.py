"""What the commands say where there is nothing to show, and where a word or a number is not what they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sky_monarch.cli import app
from sky_monarch.cli._complete import head_places, run_names, unended_names
from sky_monarch.launch.folder import write_json


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*words: str, code: int = 0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done

    return call


@pytest.mark.parametrize("replicas", ["0", "-2"])
def test_no_replica_groups_at_all_is_the_end_of_a_run(run, replicas: str) -> None:
    said = run("scale", "--", "my-training", replicas, code=2).stderr

    assert f"replicas is {replicas}" in said
    assert "hint: `sky-monarch down` ends a run" in said


def test_debug_says_that_no_process_waits(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sky_monarch.cli.debug._waiting", list)
    done = run("debug")

    assert done.stdout == ""
    assert "no process of yours waits at a breakpoint() here" in done.stderr
    assert "procs.debug_option()" in done.stderr


def test_validate_says_where_a_problem_is_as_compilers_do(run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nreplica: 2\nrun: a\nrecovery: {grace_s: -1}\n")

    lines = run("validate", "job.yaml", code=2).stderr.splitlines()
    assert lines[0].startswith("error: job.yaml:2: replica: unknown field")
    assert any(line.startswith("error: job.yaml:4: recovery.grace_s: ") for line in lines)
    assert run("validate", "none.yaml", code=2).stderr.startswith("error: none.yaml: there is no such file")


def test_warnings_of_a_plan_name_the_file_too(run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nreplicas: 2\nrun: sleep 1\npreload: [json]\n")

    assert "warning: job.yaml:4: preload: does nothing" in run("plan", "job.yaml").stderr


def test_what_the_system_says_is_told_without_its_number(run, tmp_path: Path) -> None:
    said = run("actor-host", "--listen", "127.0.0.1:0", "--keys", "none.key", code=2).stderr
    assert said.startswith("error: none.key cannot be read: No such file or directory\n")
    assert "hint: `sky-monarch actor-keys FOLDER` makes them" in said

    run("actor-keys", str(tmp_path / "keys"))
    key = str(tmp_path / "keys/host-0.key")
    command = [sys.executable, "-m", "sky_monarch", "actor-host", "--listen", "192.0.2.1:7", "--keys", key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "Cannot assign requested address" in done.stderr
    assert "os error" not in done.stderr


def _run_of(state: Path, name: str, *, ended: bool) -> None:
    folder = state / "runs" / f"{name}-20260101-000000-0000"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"run_id": folder.name, "name": name, "created_ms": 1})
    if ended:
        write_json(folder / "final.json", {"run_id": folder.name, "name": name, "state": "SUCCEEDED"})


def test_completion_offers_what_a_command_can_do_something_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path))
    _run_of(tmp_path, "over", ended=True)
    _run_of(tmp_path, "open", ended=False)

    assert run_names("o") == ["open", "over"]
    assert unended_names("o") == ["open"]
    assert head_places("") == ["here", "cluster"]
    assert head_places("c") == ["cluster"]


@pytest.mark.parametrize(
    "words", [("scale", "o"), ("down", "o"), ("attach", "o"), ("up", "job.yaml", "--head", "c")]
)
def test_the_commands_complete_by_that(
    tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run_of(tmp_path, "over", ended=True)
    _run_of(tmp_path, "open", ended=False)
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("_SKY_MONARCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["sky-monarch", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    program = "import sys; sys.argv[0] = 'sky-monarch'; from sky_monarch.cli import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout.split() == (["cluster"] if "--head" in words else ["open"]), done.stderr


def test_make_help_is_one_table() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    columns = {len(line) - len(line.split(None, 2)[2]) for line in done.stdout.splitlines()}
    assert len(columns) == 1, done.stdout
