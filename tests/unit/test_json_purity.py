"""H49: whatever takes ``--json`` prints JSON on stdout and nothing else, whatever goes wrong; people read stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from sky_monarch.cli import app

GROUP = typer.main.get_command(app)
#: Words that a command needs, besides those that are wrong.
NEEDS = {
    "plan": ["nosuch.yaml"],
    "up": ["nosuch.yaml"],
    "validate": ["nosuch.yaml"],
    "scale": ["nosuch", "2"],
}
#: These look at this machine, and have nothing that could be missing.
ABOUT_HERE = {"doctor"}


def with_json() -> list[str]:
    commands = GROUP.commands.items()  # type: ignore[attr-defined]
    return sorted(name for name, one in commands if any("--json" in option.opts for option in one.params))


def call(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SKY_MONARCH_")}
    return subprocess.run(
        [sys.executable, "-m", "sky_monarch", *words],
        cwd=folder,
        env={**kept, "SKY_MONARCH_STATE_DIR": str(folder / "state"), "TERM": "xterm-256color", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_commands_with_json_are_all_of_those_that_are_looked_at() -> None:
    assert set(with_json()) >= {
        "status",
        "events",
        "attach",
        "down",
        "up",
        "plan",
        "validate",
        "scale",
        "doctor",
    }


@pytest.mark.parametrize("wrong", ["nothing is there", "an unknown option", "a damaged state folder"])
@pytest.mark.parametrize("command", with_json())
def test_whatever_goes_wrong_stdout_parses_and_people_are_told_on_stderr(
    tmp_path: Path, command: str, wrong: str
) -> None:
    words = [command, *NEEDS.get(command, [] if command in ABOUT_HERE else ["nosuch"]), "--json"]
    if wrong == "an unknown option":
        words.append("--nosuch")
    elif command in ABOUT_HERE:
        pytest.skip("it needs nothing")
    elif wrong == "a damaged state folder":
        (tmp_path / "state").write_text("a file")

    done = call(tmp_path, *words)

    assert done.returncode not in (0, 1), (done.stdout, done.stderr)
    json.loads(done.stdout)
    found = command == "validate" and wrong != "an unknown option"  # what is wrong with a file is its answer
    assert found or done.stderr.strip(), "the notice for people"
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}], ids=str)
def test_json_has_no_colours_also_where_they_are_asked_for(tmp_path: Path, env: dict[str, str]) -> None:
    for words in (["status", "--json"], ["status", "nosuch", "--json"]):
        done = call(tmp_path, *words, **env)
        json.loads(done.stdout)
        assert "\x1b" not in done.stdout
