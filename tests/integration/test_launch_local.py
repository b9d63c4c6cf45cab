"""Local launches with real processes: what is written, what is cleaned up, who wins a name.

The agent is a stand-in where a test is about launching alone; tests of whole runs are elsewhere.
"""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sky_monarch.errors import LaunchError, RunExistsError
from sky_monarch.launch import local, process
from sky_monarch.launch.folder import Phase, RunFolder, list_runs, new_run_id, write_json
from sky_monarch.launch.plan import plan_local

JOB = {
    "name": "x",
    "replicas": 2,
    "min_replicas": 1,
    "lighthouse": {"kind": "sky-monarch"},
    "envs": ["KEY"],
    "secrets": ["T"],
}
SLEEPER = [sys.executable, "-c", "import time; print('agent is up', flush=True); time.sleep(60)"]


def eventually(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / "s"
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(folder))
    yield folder
    for run in list_runs(folder):
        left = process.carrying(run.run_id)
        assert not left, f"left behind: {[found.command() for found in left]}"


def plan(state, agent_argv=SLEEPER, *, run_id=None, **changes):
    made = plan_local(
        {**JOB, **changes},
        {"envs": {"KEY": "canary-env"}, "secrets": {"T": "canary-secret"}},
        run_id=run_id or new_run_id("x"),
        state=state,
        temporary=state.parent / "t",
        python=sys.executable,
        version="0",
        token="f00d" * 16,
        base_env={"TOKEN_OF_THE_SHELL": "canary-base"},
    )
    return dataclasses.replace(made, agent_argv=agent_argv)


def test_a_launch_writes_the_run_folder_of_the_contract(state, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-exported")
    folder = local.launch(plan(state), ready=lambda _: True)
    try:
        for private in (state, state / "runs", state / "names", folder.path):
            assert stat.S_IMODE(private.stat().st_mode) == 0o700, private
        for file in folder.path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            if file.name != "private.json":
                assert b"canary" not in file.read_bytes(), f"{file.name} holds a secret"
        assert json.loads((folder.path / "job.json").read_text())["secrets"] == ["T"]
        assert set(folder.info["sockets"]) == {"api", "controller", "agent", "lighthouse"}
        agent = folder.agent()
        assert agent is not None
        assert os.getsid(agent.pid) == agent.pid, (
            "it has a session of its own: a terminal's signals do not reach it"
        )
        environ = Path(f"/proc/{agent.pid}/environ").read_bytes()
        assert b"canary" not in environ
        assert f"SKY_MONARCH_RUN_ID={folder.run_id}".encode() in environ.split(b"\0")
        assert folder.phase() is Phase.LIVE
    finally:
        assert local.reap(folder, grace_s=1) == []
    assert folder.phase() is Phase.LOST
    assert local.finish(folder, state="CANCELLED", reason="test", exit_code=8)["exit_code"] == 8
    assert not (folder.path / "private.json").exists()


def test_sockets_move_to_a_short_folder_where_their_path_would_be_too_long(state, tmp_path):
    (tmp_path / "t").mkdir()
    deep = state / ("d" * 90)
    made = plan(deep)
    folder = local.launch(made, ready=lambda _: True)
    assert len(str(folder.api)) < 108
    assert stat.S_IMODE(folder.api.parent.stat().st_mode) == 0o700
    folder.api.touch()
    local.reap(folder, grace_s=1)
    local.finish(folder, state="CANCELLED", reason="test", exit_code=8)
    assert list((tmp_path / "t").iterdir()) == [], "the folder outside of the run folder is removed"


@pytest.mark.parametrize(
    ("argv", "words", "deadline_s"),
    [
        (
            [sys.executable, "-c", "import sys; sys.exit('no such lighthouse')"],
            "ended with code 1.*no such lighthouse",
            60.0,
        ),
        (
            [sys.executable, "-c", "import time; print('still thinking', flush=True); time.sleep(60)"],
            "did not answer within 1 s",
            1.0,
        ),
        (["/no/such/python"], "could not be started", 60.0),
    ],
)
def test_a_launch_that_fails_says_why_and_leaves_nothing_running(state, argv, words, deadline_s):
    made = plan(state, argv)
    with pytest.raises(LaunchError, match=f"(?s){words}") as caught:
        local.launch(made, ready=lambda _: False, deadline_s=deadline_s)
    assert process.carrying(made.run_id) == []
    folder = RunFolder(made.run_dir)
    assert folder.final["state"] == "FAILED"
    assert not (folder.path / "private.json").exists()
    assert caught.value.hint or argv[0].startswith("/no")
    local.reap(local.launch(plan(state, run_id=made.run_id + "b"), ready=lambda _: True), grace_s=0.5)


def test_descendants_that_left_the_session_are_ended_too(state):
    script = "setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 60"
    folder = local.launch(
        plan(state, ["sh", "-c", script]), ready=lambda run: len(process.carrying(run.run_id)) >= 3
    )
    assert local.reap(folder, grace_s=0.3) == []
    assert process.carrying(folder.run_id) == []
    local.finish(folder, state="CANCELLED", reason="test", exit_code=8)


def test_of_two_launches_of_a_name_at_the_same_instant_one_wins(state):
    barrier = threading.Barrier(4)

    def attempt(number):
        made = plan(state, run_id=f"x-20260101-000000-000{number}")
        barrier.wait()
        try:
            return local.launch(made, ready=lambda _: True)
        except RunExistsError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(attempt, range(4)))
    (winner,) = [result for result in results if isinstance(result, RunFolder)]
    losers = [result for result in results if isinstance(result, RunExistsError)]
    assert len(losers) == 3
    for error in losers:
        assert winner.run_id in str(error)
        assert "since 20" in str(error)
        assert "pid" in str(error)
        assert "attach x" in error.hint
    assert len(list_runs(state)) == 1, "the losers left no folder"
    local.reap(winner, grace_s=1)
    local.finish(winner, state="CANCELLED", reason="test", exit_code=8)


def test_a_name_is_free_again_after_its_run_and_taken_while_processes_are_left(state):
    first = local.launch(plan(state), ready=lambda _: True)
    agent = first.agent()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "SKY_MONARCH_RUN_ID": first.run_id}) as orphan:
        os.kill(agent.pid, signal.SIGKILL)
        eventually(lambda: not agent.alive)
        with pytest.raises(RunExistsError, match="agent dead, but 1 process is left"):
            local.launch(plan(state), ready=lambda _: True)
        orphan.kill()
    second = local.launch(plan(state, run_id="x-20260101-000000-0001"), ready=lambda _: True)
    local.reap(second, grace_s=1)


LAUNCHER = """
import dataclasses, sys, signal
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from sky_monarch.launch import local
from sky_monarch.launch.plan import plan_local
state = Path(sys.argv[2])
job = {"name": "x", "replicas": 1}
plan = plan_local(job, {}, run_id="x-20260101-000000-0000", state=state, temporary=state,
    python=sys.executable, version="0", token="f" * 32, base_env={})
plan = dataclasses.replace(plan, agent_argv=["sleep", "60"])
try:
    print("go", flush=True)
    local.launch(plan, ready=lambda _: False)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 20, 40, 80, 160])
def test_a_launch_interrupted_at_any_moment_leaves_nothing_or_a_run_that_is_listed(state, number, after_ms):
    root = Path(local.__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, root, state], stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        time.sleep(after_ms / 1000)  # the moment itself is what is tested
        launcher.send_signal(number)
        code = launcher.wait(20)
    folders = list_runs(state)
    processes = process.carrying("x-20260101-000000-0000")
    if number is signal.SIGINT:
        assert code == 130
        assert folders == []
        assert processes == []
        assert not (state / "runs").exists() or list((state / "runs").iterdir()) == []
        return
    assert folders or not processes, "what runs is listed"
    for folder in folders:
        assert folder.phase() in (Phase.LIVE, Phase.LOST)
        assert local.reap(folder, grace_s=1) == []
        local.finish(folder, state="FAILED", reason="launcher killed", exit_code=1)
    assert process.carrying("x-20260101-000000-0000") == []


def test_a_json_file_is_whole_or_absent(tmp_path):
    target = tmp_path / "a.json"
    write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
