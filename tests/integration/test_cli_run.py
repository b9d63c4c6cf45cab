"""Whole runs as a user starts them: the real CLI, agent, controller and lighthouse; ranks without torch."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from sky_monarch.launch import process
from sky_monarch.launch.folder import list_runs
from tests.support.files import holders, read
from tests.support.runs import ROOT, kill_agent_for_good
from tests.support.waiting import PATIENCE

pytest.importorskip("sky_monarch._core", reason="the compiled core is what runs here")

TICKER = """\
import os, sys, time
for number in range(int(sys.argv[1])):
    print("tick", number, os.environ["REPLICA_GROUP_ID"], flush=True)
    time.sleep(0.05)
"""


def eventually(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "s"
    yield folder
    for run in list_runs(folder):
        left = process.carrying(run.run_id)
        process.end(run.run_id, grace_s=0.5)
        assert not left, f"left behind: {[found.command() for found in left]}"


@pytest.fixture
def env(state):
    keep = {key: value for key, value in os.environ.items() if not key.startswith("SKY_MONARCH_")}
    return {**keep, "SKY_MONARCH_STATE_DIR": str(state), "TERM": "xterm-256color"}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "tick.py").write_text(TICKER)

    def write(ticks=1000, **more):
        fields = {
            "name": "x",
            "replicas": 2,
            "run": f"python tick.py {ticks}",
            "recovery": {"standby": 0, "grace_s": 2},
            **more,
        }
        (tmp_path / "job.yaml").write_text(json.dumps(fields))
        return tmp_path / "job.yaml"

    return write


@pytest.fixture
def cli(env, tmp_path):
    def call(*arguments, env=env):
        command = [sys.executable, "-m", "sky_monarch", *map(str, arguments)]
        return subprocess.run(
            command,
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110 * PATIENCE,
            stdin=subprocess.DEVNULL,
        )

    return call


def test_a_run_is_shown_ends_and_stays_readable(cli, job, state):
    done = cli("up", job(ticks=8))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^\[(\d)/0\] tick (\d) (\d)$", done.stdout, re.MULTILINE)
    assert sorted(shown) == sorted((str(r), str(n), str(r)) for r in range(2) for n in range(8)), (
        "each line, once"
    )
    assert "\x1b" not in done.stdout
    assert re.search(r"^SUCCEEDED x-", done.stdout, re.MULTILINE)
    assert cli("logs", "x", "--replica", 1, "--rank", 0).stdout == "".join(f"tick {n} 1\n" for n in range(8))
    events = [json.loads(line) for line in cli("events", "x", "--json").stdout.splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert "rank_exited" in {event["event"] for event in events}
    (run,) = list_runs(state)
    assert not (run.path / "private.json").exists()


def test_a_run_whose_rank_fails_says_who_and_where_with_the_contracts_exit_code(cli, job, tmp_path):
    (tmp_path / "tick.py").write_text(
        "import os, time\n"
        "def step():\n"
        "    if os.environ['RANK'] == '2':\n"
        "        raise ValueError('bad batch')\n"
        "    time.sleep(60)\n"
        "step()\n"
    )
    recovery = {"max_restarts": 1, "backoff_s": 0.1, "standby": 0}
    done = cli("up", job(recovery=recovery, ranks_per_replica=3, replicas=1))
    assert done.returncode == 4, done.stdout + done.stderr
    report = done.stdout[done.stdout.index("recovery report: ") :]
    assert len(report.splitlines()) <= 24, "on one screen"
    assert re.search(r"replica 0 rank 2, generation 2: exited with code 1\n  ValueError: bad batch", report)
    assert f"at {tmp_path / 'tick.py'}:4" in report
    assert "ended with it: rank 0, 1" in report
    assert "sky_monarch/" not in report, "nothing of the framework"
    (command,) = re.findall(r"^next: sky-monarch (logs x-.*)$", report, re.MULTILINE)
    assert "--rank 2" in command
    trace = cli(*command.split()).stdout
    assert "Traceback (most recent call last):" in trace, "the command shows all of it"
    assert "in step" in trace


def test_secrets_are_in_the_private_file_and_the_ranks_only(cli, job, state, env):
    value = "canary\"a$b`c'\n=é"
    exported = {**env, "FROM_SHELL": f"{value}2"}
    assert (
        cli("up", job(), "-d", "--env", f"KEY={value}1", "--secret", "FROM_SHELL", env=exported).returncode
        == 0
    )
    (run,) = list_runs(state)
    ranks = []

    def rank_processes():
        ranks[:] = [found for found in process.carrying(run.run_id) if "tick.py" in found.command()]
        return len(ranks) == 2

    eventually(rank_processes)
    for rank in ranks:
        variables = read(Path(f"/proc/{rank.pid}/environ")).split(b"\0")
        assert f"KEY={value}1".encode() in variables
        assert f"FROM_SHELL={value}2".encode() in variables
    for found in process.carrying(run.run_id):
        assert b"canary" not in read(Path(f"/proc/{found.pid}/cmdline"))
        if found not in ranks and "python -m sky_monarch" in found.command():
            assert b"canary" not in read(Path(f"/proc/{found.pid}/environ"))
    private = run.path / "private.json"
    assert private.stat().st_mode & 0o777 == 0o600
    assert holders(state, b"canary") == [private]
    assert cli("down", "x").returncode == 0
    assert holders(state, b"canary") == []


def test_two_ups_of_a_name_at_the_same_instant_start_one_run(job, state, env, cli, tmp_path):
    command = [sys.executable, "-m", "sky_monarch", "up", str(job()), "-d", "-n", "y"]
    both = [
        subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outcomes = sorted(
        (process.returncode, err) for process in both for _, err in [process.communicate(timeout=60)]
    )
    assert [code for code, _ in outcomes] == [0, 7]
    assert re.search(r"'y' is live: y-\S+ \(.*pid \d+, since 20", outcomes[1][1])
    assert "attach y" in outcomes[1][1]
    assert len(list_runs(state)) == 1
    assert cli("down", "--all").returncode == 0


@pytest.mark.parametrize("moment", range(8))
def test_ctrl_c_at_any_moment_of_up_leaves_nothing_that_down_does_not_end(
    job, state, env, cli, tmp_path, moment
):
    # What the command itself does as soon as Python has started, which may take long; see `test_lifecycle.py` for that.
    started = tmp_path / "started"
    start = (
        "import os, pathlib, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(130))\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "runpy.run_module('sky_monarch', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", start, "up", str(job())]
    delay_s = random.Random(moment).uniform(0.3 * moment, 0.3 * (moment + 1))
    with subprocess.Popen(
        command,
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as up:
        eventually(started.exists)
        time.sleep(delay_s)  # the moment itself is what is tested
        up.send_signal(signal.SIGINT)
        out, _ = up.communicate(timeout=60)
    assert up.returncode == 130, out
    assert "Traceback" not in out
    for run in list_runs(state):
        if process.carrying(run.run_id):
            assert run.run_id in cli("status").stdout
    assert cli("down", "--all").returncode == 0
    assert all(process.carrying(run.run_id) == [] for run in list_runs(state))


def test_ctrl_c_that_meets_an_exec_of_pythons_own_is_exit_code_130_too(tmp_path):
    # As the making of a dataclass is, for one.
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from sky_monarch.cli import _output, main\n"
        "def ctrl_c(*_):\n"
        "    raise KeyboardInterrupt\n"
        "_output.typer.core.TyperGroup.invoke = lambda *_: exec('ctrl_c()', globals())\n"
        "sys.argv[1:] = ['status']\n"
        "main()\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "interrupted" in done.stderr) == (130, True), done.stderr


def test_a_run_whose_agent_and_its_keeper_are_killed_is_lost_and_down_reaps_it(cli, job, state):
    assert cli("up", job(run="setsid sleep 300 & exec sleep 300"), "-d").returncode == 0
    (run,) = list_runs(state)
    eventually(lambda: sum("sleep" in found.command() for found in process.carrying(run.run_id)) == 4)
    kill_agent_for_good(run)
    assert json.loads(cli("status", "x", "--json").stdout)["state"] == "LOST"
    assert process.carrying(run.run_id), "what left its session is there to be reaped"
    done = cli("down", "x")
    assert done.returncode == 0, done.stderr
    assert process.carrying(run.run_id) == []
    assert "already gone" in cli("down", "x").stdout


def test_attached_streams_survive_the_death_of_the_controller(job, state, env, tmp_path):
    command = [sys.executable, "-m", "sky_monarch", "up", str(job(ticks=100))]
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        run = eventually(lambda: next(iter(list_runs(state)), None))
        eventually(lambda: (run.path / "logs" / "r1-0").is_dir())
        os.kill(run.process("controller").pid, signal.SIGKILL)
        out, err = up.communicate(timeout=90)
    assert up.returncode == 0, out + err
    shown = re.findall(r"^\[(\d)/0\] tick (\d+) \d$", out, re.MULTILINE)
    assert sorted(shown) == sorted((str(r), str(n)) for r in range(2) for n in range(100)), (
        "no line lost or shown twice"
    )


def test_up_on_a_terminal_shows_the_table_and_stops_the_run_on_request(job, state, env, tmp_path):
    arguments = ["-m", "sky_monarch", "up", str(job())]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        env=env,
        cwd=str(tmp_path),
        encoding="utf-8",
        dimensions=(40, 140),
        timeout=60,
    )
    try:
        child.expect("GENERATION")
        child.expect(r"tick \d+ 1")
        child.sendintr()
        child.expect("stop the run")
        child.sendline("y")
        child.expect("CANCELLED x-")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 130
    (run,) = list_runs(state)
    assert process.carrying(run.run_id) == []


def test_a_rehearsed_kill_is_recovered_and_reported(cli, job):
    done = cli("up", job(ticks=120), "--inject", "kill:replica=1,rank=0,after=1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    *events, final = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"injected", "rank_exited", "generation_ended"} <= {event["event"] for event in events}
    assert final["state"] == "SUCCEEDED"
    (recovery,) = final["recoveries"]
    assert (recovery["replica"], recovery["generation"], recovery["next_generation"]) == (1, 1, 2)
