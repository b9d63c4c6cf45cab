"""A program that is written for Monarch sees the same with ours (`make test-peers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("SKY_MONARCH_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))
EXAMPLES = ("ping_pong.py", "parameter_server.py", "async_rl.py")
REFUSED = {
    "a failure",
    "one failure",
    "several for call_one",
    "no such endpoint",
    "no such argument",
    "no such dimension",
    "no such index",
    "no such place",
}


def run(python: Path | str, script: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seen(python: Path | str, module: str) -> dict[str, object]:
    lines = run(python, ROOT / "tests/support/monarch_words.py", module).splitlines()
    return {name: value for line in lines if line.startswith("{") for name, value in json.loads(line).items()}


def test_a_program_sees_the_same_meshes_places_values_and_errors() -> None:
    theirs, ours = seen(PEERS, "monarch.actor"), seen(sys.executable, "sky_monarch.actor")
    assert ours == theirs
    # What both raise is asked for; else the same mistake in the program would make them the same.
    assert {name for name, found in ours.items() if str(found).startswith("raises")} == REFUSED
    assert len(ours) > 30


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_on_monarch_with_its_import_changed(example: str, tmp_path: Path) -> None:
    text = (ROOT / "examples/actors" / example).read_text()
    assert text.count("from sky_monarch.actor import") == 1
    script = tmp_path / example
    script.write_text(text.replace("from sky_monarch.actor import", "from monarch.actor import"))
    assert run(PEERS, script)
