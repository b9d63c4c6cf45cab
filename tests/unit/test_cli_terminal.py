"""What Ctrl-C means on a terminal, and what a terminal shows."""

import io
import json
import os
import signal
import sys
import types
from pathlib import Path

import pexpect
import pytest
import typer

from sky_monarch.cli import _follow, _view
from sky_monarch.launch.folder import RunFolder, write_json

DOUBLE = Path(__file__).with_name("controller_double.py")
QUESTION = r"stop the run\? \[y\]es / \[d\]etach / \[c\]ontinue: "


@pytest.fixture
def env(tmp_path):
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("SKY_MONARCH_", "NO_COLOR"))
    }
    return {**keep, "SKY_MONARCH_STATE_DIR": str(tmp_path / "s"), "TERM": "xterm-256color"}


@pytest.fixture
def folder(env, tmp_path):
    child = pexpect.spawn(sys.executable, [str(DOUBLE), str(tmp_path / "s"), "x"], env=env, encoding="utf-8")
    child.expect(r"(x-\d+-\d+-\w+)\r\n")
    folder = RunFolder(tmp_path / "s" / "runs" / child.match[1])
    groups = [{"replica": 0, "state": "RUNNING", "generation": 4, "step": 17, "loss": 2.5}]
    (folder.path / "status.json").write_text(json.dumps({"groups": groups, "target_step": 99}))
    with (folder.path / "logs.ndjson").open("w") as file:
        file.write(
            json.dumps({"replica": 0, "rank": 0, "generation": 1, "line": "1%\r2%\x1b[2Jclear"}) + "\n"
        )
    yield folder
    child.close(force=True)


@pytest.fixture
def attached(folder, env):
    arguments = ["-m", "sky_monarch", "attach", "x"]
    child = pexpect.spawn(
        sys.executable, arguments, env=env, encoding="utf-8", dimensions=(40, 140), timeout=60
    )
    child.expect("STEPS/S")
    yield child
    child.close(force=True)


def code(child):
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_a_terminal_shows_a_table_that_is_redrawn_and_tame_log_lines(attached, folder):
    attached.expect("17 +2.500")
    attached.expect("17 +2.500")
    shown = attached.before + attached.after
    assert "\x1b[2J" not in shown, "a rank cannot clear our screen"
    write_json(
        folder.path / "final.json",
        {"run_id": folder.run_id, "name": "x", "state": "SUCCEEDED", "exit_code": 0},
    )
    os.kill(folder.agent().pid, signal.SIGTERM)
    attached.expect("SUCCEEDED x-")
    assert code(attached) == 0


def test_ctrl_c_asks_and_d_leaves_the_run_running(attached, folder):
    attached.sendintr()
    attached.expect(QUESTION)
    attached.sendline("d")
    attached.expect("detached; the run goes on: sky-monarch attach x")
    assert code(attached) == 130
    assert folder.phase().name == "LIVE"


def test_ctrl_c_asks_and_c_continues(attached, folder):
    attached.sendintr()
    attached.expect(QUESTION)
    attached.sendline("c")
    attached.expect("STEPS/S")
    attached.sendintr()
    attached.expect(QUESTION)
    attached.sendline("")
    attached.expect("STEPS/S")
    assert folder.phase().name == "LIVE"


@pytest.mark.parametrize("answer", ["yes\n", "\x03"])
def test_ctrl_c_stops_the_run_after_a_yes_or_a_second_ctrl_c(attached, folder, answer):
    attached.sendintr()
    attached.expect(QUESTION)
    attached.send(answer)
    attached.expect(f"stopping {folder.run_id}")
    attached.expect(f"CANCELLED {folder.run_id}")
    assert code(attached) == 130
    assert folder.final["reason"] == "Ctrl-C"
    assert folder.agent() is None


def test_ctrl_c_while_the_table_is_drawn_again_asks_again(monkeypatch):
    """Who sees the table may press once more, though all of the answer before is not carried out yet."""

    class Streams:
        def __init__(self, *_, **__):
            self.errors, self.status, self.open = [], None, 2

        def batch(self, timeout_s):
            raise KeyboardInterrupt

        def close(self):
            pass

    class View(_view.PlainView):
        presses = 1

        def resume(self):
            if self.presses:
                self.presses -= 1
                raise KeyboardInterrupt

    monkeypatch.setattr(_follow, "_Streams", Streams)
    monkeypatch.setattr(_follow, "_choice", lambda view, pressed, owner: _follow._ask(view))
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\nd\n"))
    run = types.SimpleNamespace(folder=None, name="x", run_id="x-1", over=False)
    with pytest.raises((typer.Exit, KeyboardInterrupt)) as left:
        _follow.follow(run, View())
    assert isinstance(left.value, typer.Exit), "nobody was asked"
    assert left.value.exit_code == 130
    assert sys.stdin.read() == "", "both were answered"


def test_no_color_and_dumb_terminals_are_respected(folder, env):
    for extra, table in (({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, True)):
        arguments = ["-m", "sky_monarch", "attach", "x"]
        child = pexpect.spawn(
            sys.executable, arguments, env={**env, **extra}, encoding="utf-8", dimensions=(40, 140)
        )
        child.expect("STEPS/S" if table else r"\[0/0\] 1%")
        child.sendintr()
        child.expect(QUESTION)
        colours = [
            part for part in ("\x1b[31m", "\x1b[36m", "\x1b[33m", "\x1b[1;31m") if part in child.before
        ]
        assert colours == []
        child.close(force=True)
