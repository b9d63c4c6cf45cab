"""Secrets: in the process that needs them and one private file, however they were given, however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import pids
from tests.support.runs import Workbench, ended_at_exit
from tests.support.waiting import eventually

# Of this process: others may have canaries of their own on this machine, and type them.
CANARY = b"canary-%d-" % os.getpid()

LEAKY = """
import os, sys
values = [os.environ[key] for key in ("WANDB_API_KEY", "TOKEN")]
assert all(value.startswith("canary") for value in values)
open(f"seen-{os.environ['SKY_MONARCH_GENERATION']}", "w").write("")
"""
WAITS = "import time; time.sleep(300)"
FAILS = "raise SystemExit(3)"


def holders(folder: Path) -> list[Path]:
    """Files under ``folder`` that hold a canary; one renamed meanwhile is seen under its new name."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and CANARY in path.read_bytes():
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def with_canary(what: str) -> set[int]:
    """Processes of this machine in whose ``environ`` or ``cmdline`` a canary can be read."""
    found = set()
    for pid in pids():
        try:
            data = Path(f"/proc/{pid}/{what}").read_bytes()
        except OSError:
            continue
        if CANARY in data:
            found.add(pid)
    return found


@pytest.mark.parametrize("given", ["exported", pytest.param("typed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["down", "failure"])
def test_a_secret_is_nowhere_but_in_its_process_and_one_private_file(
    workbench: Workbench, given: str, ending: str
) -> None:
    values = {"WANDB_API_KEY": f"{CANARY.decode()}one", "TOKEN": f"{CANARY.decode()}two"}
    # Exported and not asked for: it is the shell's, and still nothing that our own processes may hold.
    workbench.env["OTHER_TOKEN"] = f"{CANARY.decode()}three"
    if given == "exported":
        workbench.env |= values
        options = ["--env", "WANDB_API_KEY", "--secret", "TOKEN"]
    else:
        options = ["--env", f"WANDB_API_KEY={values['WANDB_API_KEY']}", f"--secret=TOKEN={values['TOKEN']}"]
    script = workbench.folder / "job.py"
    script.write_text(LEAKY + (FAILS if ending == "failure" else WAITS))
    job = workbench.job(
        "secret", run=f"{sys.executable} {script}", replicas=1, recovery={"max_restarts": 1, "standby": 1}
    )
    with ended_at_exit(workbench.popen("up", str(job), *options)) as up:
        eventually((workbench.folder / "seen-1").exists, within_s=40)
        workbench.names.append("secret")
        assert not with_canary("cmdline"), "also not in that of `up` itself"
        if ending == "down":
            rank, status = workbench.running_pid("secret", 0), workbench.status("secret")
            environs = with_canary("environ")
            assert rank in environs
            for pid in (status["agent_pid"], status["controller_pid"], status["lighthouse"]["pid"]):
                assert pid not in environs, Path(f"/proc/{pid}/cmdline").read_bytes()
            (holder,) = holders(workbench.home)
            assert holder.name == "private.json"
            assert holder.stat().st_mode & 0o777 == 0o600
            for path in [workbench.home, *workbench.home.rglob("*")]:
                if path.is_dir():
                    assert path.stat().st_mode & 0o077 == 0, path
            assert workbench.cli("down", "secret").returncode == 0
        out, err = up.communicate(timeout=60)
    assert up.returncode == (4 if ending == "failure" else 8), out + err
    assert CANARY.decode() not in out + err
    assert workbench.status("secret")["state"] in {"FAILED", "CANCELLED"}
    assert not holders(workbench.home), "an ended run needs no secrets"
    for command in (["events", "secret", "--json"], ["status", "secret", "--json"], ["logs", "secret"]):
        assert CANARY.decode() not in workbench.cli(*command).stdout


def test_values_that_are_typed_cannot_be_read_off_the_command_while_it_runs(workbench: Workbench) -> None:
    """Whatever the text: empty, the same twice, a prefix of another, no ASCII."""
    job = workbench.job("typed", run="sleep 300", replicas=1)
    options = [
        "--env",
        "A=",
        "--env",
        "B=canary-é=1",
        "--secret",
        "C=canary-é",
        "--env=D=canary-é",
        "-n",
        "t",
    ]
    with ended_at_exit(workbench.popen("up", str(job), *options)) as up:
        workbench.names.append("t")
        eventually(lambda: workbench.status("t")["state"] == "RUNNING", within_s=60)
        command = Path(f"/proc/{up.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        size = len("canary-é".encode())
        masked = [b"A=", b"B=" + b"x" * (size + 2), b"C=" + b"x" * size, b"--env=D=" + b"x" * size]
        assert [part for part in command if b"=" in part] == masked
        assert command[-2:] == [b"-n", b"t"], "the rest is as it was"
        rank = Path(f"/proc/{workbench.running_pid('t', 0)}/environ").read_bytes().split(b"\0")
        assert {b"A=", "B=canary-é=1".encode(), "C=canary-é".encode(), "D=canary-é".encode()} <= set(rank)
        assert workbench.cli("down", "t").returncode == 0


AWKWARD = "a$b\"c`d'\n=é 😀 \\ %s {x} # end\t"
DUMP = """
import json, os, time
assert os.environb[b"AWKWARD"].decode() == os.environ["AWKWARD"]
name = f"env-{os.environ['REPLICA_GROUP_ID']}-{os.environ['SKY_MONARCH_GENERATION']}.json"
open(name + "~", "w").write(json.dumps({key: os.environ.get(key) for key in ("AWKWARD", "HIDDEN", "EMPTY")}))
os.rename(name + "~", name)
time.sleep(300)
"""


# A script without a session gets its standby after half a minute.
@pytest.mark.parametrize("standby", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_values_are_byte_equal_on_every_replica_and_in_every_generation(
    workbench: Workbench, standby: int
) -> None:
    script = workbench.folder / "dump.py"
    script.write_text(DUMP)
    job = workbench.job(
        "bytes",
        run=f"{sys.executable} {script}",
        replicas=2,
        envs={"AWKWARD": AWKWARD, "EMPTY": ""},
        secrets={"HIDDEN": AWKWARD[::-1]},
        recovery={"standby": standby},
    )
    name = workbench.up(job)
    eventually(lambda: len(list(workbench.folder.glob("env-*-1.json"))) == 2, within_s=40)
    if standby:
        ready = {"event": "standby_ready", "replica": 1}
        eventually(
            lambda: any(ready.items() <= event.items() for event in workbench.events(name)), within_s=40
        )
    os.kill(workbench.running_pid(name, 1), signal.SIGKILL)
    eventually((workbench.folder / "env-1-2.json").exists, within_s=40)

    def spawned_again() -> list[dict]:
        events = workbench.events(name)
        return [e for e in events if e["event"] == "rank_spawned" and e["generation"] == 2]

    again = eventually(spawned_again)
    assert [event["warm"] for event in again] == [bool(standby)]
    files = list(workbench.folder.glob("env-*.json"))
    assert len(files) == 3
    for file in files:
        values = json.loads(file.read_text())
        assert values == {"AWKWARD": AWKWARD, "HIDDEN": AWKWARD[::-1], "EMPTY": ""}, file.name
