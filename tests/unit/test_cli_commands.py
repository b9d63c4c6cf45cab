"""The commands as a user runs them: real processes of the CLI, a double for the run."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sky_monarch.launch.folder import RunFolder, write_json

DOUBLE = Path(__file__).with_name("controller_double.py")
JOB = "name: x\nreplicas: 2\nrun: sleep 60\n"


def eventually(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def env(tmp_path):
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("SKY_MONARCH_", "FORCE_COLOR"))
    }
    return {**keep, "SKY_MONARCH_STATE_DIR": str(tmp_path / "s"), "TERM": "xterm", "COLUMNS": "200"}


@pytest.fixture
def cli(env, tmp_path):
    def call(*arguments, **options):
        command = [sys.executable, "-m", "sky_monarch", *map(str, arguments)]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, **options
        )

    return call


@pytest.fixture
def start(env, tmp_path):
    started = []

    def begin(name="x"):
        process = subprocess.Popen(
            [sys.executable, DOUBLE, tmp_path / "s", name], stdout=subprocess.PIPE, text=True, env=env
        )
        started.append(process)
        return RunFolder(tmp_path / "s" / "runs" / process.stdout.readline().strip()), process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def write_lines(folder, file, *values):
    with (folder.path / file).open("a") as out:
        out.writelines(json.dumps(value) + "\n" for value in values)


def end(folder, process, **final):
    write_json(folder.path / "final.json", {"run_id": folder.run_id, "name": folder.name, **final})
    process.terminate()
    process.wait()


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["status", "nosuch", "--json"], 6, "RunNotFoundError"),
        (["events", "nosuch", "--json"], 6, "RunNotFoundError"),
        (["attach", "nosuch", "--json"], 6, "RunNotFoundError"),
        (["down", "nosuch", "--json"], 6, "RunNotFoundError"),
        (["down", "--json"], 2, "ConfigError"),
        (["up", "nosuch.yaml", "--json"], 2, "JobFileError"),
        (["up", "--nosuch", "--json"], 2, "UsageError"),
        (["status", "--json", "--nosuch"], 2, "UsageError"),
    ],
)
def test_with_json_stdout_parses_even_on_errors(cli, arguments, code, kind):
    done = cli(*arguments)
    assert done.returncode == code
    assert json.loads(done.stdout)["error"]["kind"] == kind
    assert done.stderr.strip(), "the notice for people is on stderr"
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_errors_have_a_hint_and_a_traceback_only_with_debug(cli, start):
    start()
    done = cli("status", "xx")
    assert (done.returncode, done.stdout) == (6, "")
    assert re.fullmatch(r"error: no run is named 'xx'\nhint: did you mean 'x'\?\n", done.stderr)
    assert "Traceback" in cli("--debug", "status", "xx").stderr


def test_status_without_runs_says_so_on_stderr_only(cli):
    done = cli("status")
    assert (done.returncode, done.stdout) == (0, "")
    assert "--all" in done.stderr
    assert json.loads(cli("status", "--json").stdout) == []


def test_status_shows_groups_recoveries_and_exits(cli, start):
    folder, _ = start()
    exited = {"rank": 0, "pid": None, "state": "exited", "exit": {"code": 7}}
    groups = [
        {
            "replica": 0,
            "state": "RUNNING",
            "generation": 1,
            "step": 12,
            "loss": float("nan"),
            "restarts": 0,
            "ranks": [{"rank": 0, "pid": 41}],
        },
        {"replica": 1, "state": "GIVEN_UP", "generation": 4, "restarts": 3, "ranks": [exited]},
    ]
    recovery = {
        "replica": 1,
        "cause": "killed by SIGKILL",
        "generation": 1,
        "next_generation": 2,
        "detect_s": 0.004,
        "lost_steps": 1,
        "warm": True,
    }
    status = {
        "state": "DEGRADED",
        "replicas": 2,
        "step": 12,
        "target_step": 99,
        "groups": groups,
        "recoveries": [recovery],
    }
    (folder.path / "status.json").write_text(json.dumps(status))
    table = cli("status").stdout.splitlines()
    assert table[0].split() == ["NAME", "STATE", "STEP", "GROUPS", "RESTARTS", "LASTED", "RUN"]
    assert table[1].split()[:5] == ["x", "DEGRADED", "12/99", "1/2", "3"]
    details = cli("status", "x").stdout
    assert "replica 1 rank 0: exited with code 7" in details
    assert re.search(r"1 -> 2\s+-\s+4 ms .*warm\s+killed by SIGKILL", details)
    shown = json.loads(cli("status", "x", "--json").stdout)
    assert shown["groups"][0]["loss"] is None, "JSON has no NaN"
    assert shown["groups"][1]["ranks"][0]["exit"]["code"] == 7


def test_logs_have_a_prefix_unless_one_process_is_selected(cli, start):
    folder, _ = start()
    lines = [{"replica": r, "rank": 0, "generation": 1, "line": f"line {r}"} for r in (0, 1)]
    write_lines(folder, "logs.ndjson", *lines)
    assert cli("logs", "x").stdout == "[0/0] line 0\n[1/0] line 1\n"
    assert cli("logs", "x", "--replica", 1).stdout == "[1/0] line 1\n"
    assert cli("logs", "x", "--replica", 1, "--rank", 0, "--tail", 1).stdout == "line 1\n"


def test_logs_that_are_not_there_say_why(cli, start):
    folder, _ = start()
    (folder.path / "raw.bin").write_bytes(b"")
    groups = [{"replica": 0, "state": "RUNNING", "generation": 2}, {"replica": 1, "generation": 3}]
    write_json(folder.path / "status.json", {"groups": groups})

    missing = cli("logs", "x", "--generation", 7)
    assert missing.returncode == 2
    assert "there is no generation 7" in missing.stderr
    assert "replica 0 is at 2, replica 1 is at 3" in missing.stderr
    one = cli("logs", "x", "--replica", 0, "--rank", 0, "--generation", 3)
    assert "hint: replica 0 is at 2\n" in one.stderr
    silent = cli("logs", "x", "--generation", 2)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "nothing was printed\n")
    write_json(folder.path / "job.json", {"setup": ""})
    assert cli("logs", "x", "--setup").stderr == "the job has no `setup`\n"
    write_json(folder.path / "job.json", {"setup": "pip list"})
    assert cli("logs", "x", "--setup").stderr == "`setup` has printed nothing\n"


def test_logs_of_one_process_are_byte_exact(env, start):
    folder, _ = start()
    blob = b"a\r\n\xff\xfe \x1b[31mred\x00 no end"
    (folder.path / "raw.bin").write_bytes(blob)
    command = [sys.executable, "-m", "sky_monarch", "logs", "x", "--replica", "1", "--rank", "0"]
    assert subprocess.run(command, env=env, capture_output=True, check=True).stdout == blob
    write_lines(folder, "logs.ndjson", {"replica": 0, "rank": 0, "generation": 1, "line": "bar 1%\rbar 2%"})
    command = [sys.executable, "-m", "sky_monarch", "logs", "x"]
    assert (
        subprocess.run(command, env=env, capture_output=True, check=True).stdout == b"[0/0] bar 1%\rbar 2%\n"
    )


def test_events_are_readable_lines_or_ndjson(cli, start):
    folder, _ = start()
    who = {"wall_ms": 0, "replica": 1, "rank": 0, "generation": 2}
    leaving = {"wall_ms": 0, "reason": "the ranks are leaving"}
    early = {"step": 30, "cause": "rank_exited", "exit": {"code": 0}, "early": [3, 120]}
    write_lines(
        folder,
        "events.ndjson",
        {"id": 1, "event": "rank_exited", **who, "pid": 9, "exit": {"signal": 9}, "oom": True},
        {"id": 2, "event": "generation_ended", **who, **early},
        {"id": 3, "event": "something_new", "wall_ms": 0, "replica": None, "colour": "\x1b[31mred"},
        {"id": 4, "event": "evicted", **who, "quorum_id": 7, "orderly": False},
        {"id": 5, "event": "evicted", **who, "quorum_id": 7, "orderly": True},
        {"id": 6, "event": "run_state", "wall_ms": 0, "state": "RUNNING", "previous": "STARTING"},
        {**leaving, "id": 7, "event": "run_state", "state": "RUNNING", "previous": "RUNNING"},
    )
    lines = cli("events", "x").stdout.splitlines()
    assert lines[0].endswith("replica 1: rank 0 of generation 2 (pid 9) killed by SIGKILL (out of memory)")
    assert lines[1].endswith(
        "replica 1: generation 2 ended at step 30: rank 0 exited with code 0 before the end (3/120)"
    )
    assert lines[2].endswith("something new colour=red")
    assert lines[3].endswith("replica 1: generation 2 evicted at the lighthouse")
    assert lines[4].endswith("replica 1: generation 2 has left the lighthouse"), "in order, no failure"
    assert lines[5].endswith(" run is RUNNING")
    assert lines[6].endswith(" run: the ranks are leaving"), "what has not changed is not told again"
    parsed = [json.loads(line) for line in cli("events", "x", "--json").stdout.splitlines()]
    assert [event["id"] for event in parsed] == [1, 2, 3, 4, 5, 6, 7]


def test_down_is_repeatable_and_says_what_it_found(cli, start):
    folder, _ = start()
    assert "ended (CANCELLED)" in cli("down", "x").stdout
    again = cli("down", "x")
    assert again.returncode == 0
    assert "already gone (CANCELLED)" in again.stdout
    assert json.loads(cli("down", "x", "--json").stdout)[0]["run_id"] == folder.run_id
    start("a")
    start("b")
    assert cli("down", "--all").stdout.count("ended (CANCELLED)") == 2
    assert "no live runs" in cli("down", "--all").stderr


def test_one_unknown_name_does_not_keep_down_from_the_others(cli, start):
    start()
    done = cli("down", "nosuch", "x")
    assert done.returncode == 6
    assert "ended (CANCELLED)" in done.stdout


def test_attach_ends_with_the_run_and_shows_who_failed_and_where(cli, env, start, tmp_path):
    folder, process = start()
    tail = [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 42, in step',
        '  File "/x/site-packages/torch/a.py", line 1, in f',
        "ValueError: bad batch",
    ]
    failure = {
        "id": 1,
        "wall_ms": 0,
        "event": "rank_exited",
        "replica": 1,
        "rank": 0,
        "generation": 1,
        "pid": 9,
        "exit": {"code": 1},
        "collateral": False,
        "oom": False,
        "tail": tail,
    }
    write_lines(folder, "events.ndjson", failure)
    write_lines(
        folder, "logs.ndjson", {"replica": 1, "rank": 0, "generation": 1, "line": "\x1b[31mstep\x1b[0m 1"}
    )
    command = [sys.executable, "-m", "sky_monarch", "attach", "x"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as attached:
        lines = [attached.stdout.readline(), attached.stdout.readline()]
        with sqlite3.connect(folder.journal) as journal:
            journal.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, event TEXT)")
            journal.execute("INSERT INTO events VALUES (1, ?)", [json.dumps(failure)])
        journal.close()
        recovery = {"replica": 0, "cause": "hang", "detect_s": 0.1}
        end(
            folder,
            process,
            state="FAILED",
            exit_code=4,
            reason="replica 1 was given up",
            recoveries=[recovery],
        )
        out, err = attached.communicate(timeout=60)
    out = "".join(lines) + out
    assert attached.returncode == 4, err
    assert "[1/0] step 1\n" in out
    assert "\x1b" not in out
    for expected in (
        "replica 1 rank 0, generation 1: exited with code 1",
        "  ValueError: bad batch",
        "  at /home/me/train.py:42",
        f"next: sky-monarch logs {folder.run_id} --replica 1 --rank 0",
        "recovery report: 1 failure",
        f"FAILED {folder.run_id}",
    ):
        assert expected in out
    assert len(out.splitlines()) < 24, "it fits on the first screen"


def test_attach_with_json_prints_events_and_one_final_status(cli, env, start):
    folder, process = start()
    write_lines(folder, "events.ndjson", {"id": 1, "wall_ms": 0, "event": "notice", "message": "a"})
    command = [sys.executable, "-m", "sky_monarch", "attach", "x", "--json"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as attached:
        first = json.loads(attached.stdout.readline())
        end(folder, process, state="SUCCEEDED", exit_code=0)
        rest = [json.loads(line) for line in attached.stdout]
    assert (first["event"], attached.returncode) == ("notice", 0)
    assert [value["state"] for value in rest] == ["SUCCEEDED"]


@pytest.mark.parametrize("command", [["events", "x", "-f"], ["logs", "x", "-f"], ["attach", "x"]])
def test_a_reader_that_leaves_is_no_error(env, start, command):
    folder, _ = start()
    write_lines(
        folder,
        "events.ndjson",
        *({"id": n, "wall_ms": 0, "event": "notice", "message": "m" * 900} for n in range(1, 300)),
    )
    write_lines(
        folder,
        "logs.ndjson",
        *({"replica": 0, "rank": 0, "generation": 1, "line": "m" * 900} for _ in range(300)),
    )
    with subprocess.Popen(
        [sys.executable, "-m", "sky_monarch", *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        err = process.stderr.read().decode()
    assert "Traceback" not in err
    assert "Error" not in err
    assert folder.phase().name == "LIVE", "the run goes on"


def test_ctrl_c_without_a_terminal_leaves_an_attached_run_running(env, start):
    folder, _ = start()
    write_lines(folder, "events.ndjson", {"id": 1, "wall_ms": 0, "event": "notice", "message": "a"})
    command = [sys.executable, "-m", "sky_monarch", "attach", "x"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as attached:
        attached.stdout.readline()
        attached.send_signal(signal.SIGINT)
        _, err = attached.communicate(timeout=60)
    assert attached.returncode == 130
    assert "the run goes on" in err
    assert folder.phase().name == "LIVE"


def test_validate_names_all_problems_with_their_lines(cli, tmp_path):
    (tmp_path / "job.yaml").write_text("name: x\nreplica: 2\nrun: a\nresources: {acelerators: MI300X:8}\n")
    done = cli("validate", "job.yaml", "--json")
    assert done.returncode == 2
    problems = json.loads(done.stdout)
    assert {(problem["line"], problem["suggestion"]) for problem in problems if problem["suggestion"]} == {
        (2, "replicas"),
        (4, "accelerators"),
    }
    assert "did you mean" in cli("validate", "job.yaml").stderr
    (tmp_path / "job.yaml").write_text(JOB)
    good = cli("validate", "job.yaml", "--json")
    assert good.returncode == 0
    assert [problem for problem in json.loads(good.stdout) if problem["severity"] == "error"] == []


def test_init_writes_a_valid_job_and_overwrites_nothing(cli, tmp_path):
    assert cli("init").returncode == 0
    assert cli("validate", "job.yaml").returncode == 0
    (tmp_path / "job.yaml").write_text("mine")
    again = cli("init", "job.yaml")
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert cli("init", "--force").returncode == 0
    assert cli("init", "no/such/folder.yaml").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inject", "kil:replica=1,step=3"], "did you mean 'kill'"),
        (["--inject", "kill:replica=2,step=3"], "replica 0 to 1"),
        (["-n", "not a name"], "not-a-name"),
        (["--env", "NOT_EXPORTED"], "NOT_EXPORTED"),
        (["--env", "RANK=1"], "RANK"),
    ],
)
def test_up_refuses_bad_arguments_before_it_makes_anything(cli, tmp_path, arguments, words):
    (tmp_path / "job.yaml").write_text(JOB)
    done = cli("up", "job.yaml", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_dry_run_shows_the_plan_without_values_and_makes_nothing(cli, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    done = cli("up", "job.yaml", "--dry-run", "--secret", "TOKEN=canary", "--env", "KEY=canary")
    assert done.returncode == 0, done.stderr
    assert "TOKEN" in done.stdout
    assert "sync: every_step" in done.stdout
    assert "canary" not in done.stdout + done.stderr
    plan = json.loads(
        cli("up", "job.yaml", "--dry-run", "--json", "--inject", "hang:replica=1,after=2").stdout
    )
    assert plan["job"]["replicas"] == 2
    assert plan["injections"][0]["fault"] == "hang"
    assert not (tmp_path / "s").exists()


def test_a_plan_cannot_draw_on_the_terminal(cli, tmp_path):
    (tmp_path / "job.yaml").write_text('name: x\nreplicas: 1\nrun: "\\e[31mred\\e]0;title\\a"\n')
    done = cli("up", "job.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout
    assert "\x1b" not in done.stdout


def test_names_of_runs_complete(env, start):
    start("alpha")
    start("beta")
    asked = {
        **env,
        "_SKY_MONARCH_COMPLETE": "complete_bash",
        "COMP_WORDS": "sky-monarch down a",
        "COMP_CWORD": "2",
    }
    program = "import sys; sys.argv[0] = 'sky-monarch'; from sky_monarch.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=asked, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["alpha"], done.stderr
