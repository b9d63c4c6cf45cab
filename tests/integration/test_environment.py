"""What the job file says arrives in the process, and secrets arrive nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.files import holders
from tests.support.runs import FREE_RANK, ROOT, Workbench
from tests.support.waiting import eventually

DUMP = """
import json, os, sys, time
who = [os.environ[key] for key in ("REPLICA_GROUP_ID", "RANK", "SKY_MONARCH_GENERATION")]
name = f"env-{'-'.join(who)}.json"
values = {key: os.environb[key.encode()].decode("utf-8") for key in sys.argv[1:] if key in os.environ}
open(name + "~", "w").write(json.dumps(values))
os.rename(name + "~", name)
time.sleep(300 if os.environ["SKY_MONARCH_GENERATION"] == "1" else 0)
"""
AWKWARD = "a$b\"c`d'\n=é \\ %s {x} # end"


def dump(workbench: Workbench, *keys: str) -> str:
    """Command that writes the named variables into a file."""
    script = workbench.folder / "dump.py"
    script.write_text(DUMP)
    return f"{sys.executable} {script} {' '.join(keys)}"


def test_values_arrive_unchanged_on_every_replica_and_after_a_restart(workbench: Workbench) -> None:
    job = workbench.write(
        f"""
        name: values
        replicas: 2
        recovery: {{standby: 0, backoff_s: 0.1}}
        run: {json.dumps(dump(workbench, "A", "B", "C", "D", "E", "F", "AWKWARD"))}
        envs: {{A: 010, B: yes, C: 1.10, D: 12:30:45, E: 2026-01-02, F: 0x10, AWKWARD: {json.dumps(AWKWARD)}}}
        """,
        name="values.yaml",
    )
    name = workbench.up(job)
    eventually(lambda: len(list(workbench.folder.glob("env-*-0-1.json"))) == 2, within_s=30)
    os.kill(workbench.running_pid(name, 1), signal.SIGKILL)
    eventually(lambda: (workbench.folder / "env-1-0-2.json").exists(), within_s=30)
    for file in workbench.folder.glob("env-*.json"):
        assert json.loads(file.read_text()) == {
            "A": "010", "B": "yes", "C": "1.10", "D": "12:30:45", "E": "2026-01-02", "F": "0x10",
            "AWKWARD": AWKWARD,
        }, file.name  # fmt: skip


def test_a_rank_gets_the_elastic_environment(workbench: Workbench) -> None:
    keys = [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
        "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ]  # fmt: skip
    job = workbench.job("elastic", run=dump(workbench, *keys), replicas=2, ranks_per_replica=2)
    workbench.up(job)
    eventually(lambda: len(list(workbench.folder.glob("env-*.json"))) == 4, within_s=30)
    values = json.loads((workbench.folder / "env-1-1-1.json").read_text())
    assert values == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def test_the_lighthouse_secret_is_not_in_the_logs(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("redact", run=f"{FREE_RANK} --steps 20", replicas=2))
    # Now: whoever sees that the run has ended and its agent is gone removes it.
    token = workbench.folder_of(name).token
    assert token
    workbench.wait_for_end(name)
    found = holders(workbench.run_folder(name), token.encode())
    assert {path.name for path in found} <= {"private.json"}


@pytest.mark.slow
def test_a_run_needs_no_host_name_that_resolves(workbench: Workbench) -> None:
    """From `up` to the last step, on a host whose name nobody knows: addresses are enough (pytorch#150532)."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a host name of its own")
    rename = "import os, socket, sys; socket.sethostname('nobody-knows-this-name'); os.execv(sys.argv[1], sys.argv[1:])"
    job = workbench.job("nameless", run=f"{FREE_RANK} --steps 20", replicas=2)
    workbench.names.append("nameless")
    done = subprocess.run(
        [
            *("unshare", "--uts", sys.executable, "-c", rename),
            *(sys.executable, "-m", "sky_monarch", "up", str(job)),
        ],
        env=workbench.env,
        cwd=workbench.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert workbench.status("nameless")["state"] == "SUCCEEDED"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("variable", "value"), [("GLOO_SOCKET_IFNAME", "^lo"), ("NCCL_SOCKET_IFNAME", "nosuch0")]
)
def test_an_interface_that_is_not_there_ends_a_run_with_its_name_and_those_that_are(
    workbench: Workbench, variable: str, value: str
) -> None:
    job = workbench.job(
        "nowhere",
        run=f"{sys.executable} {ROOT}/examples/train.py --steps 5",
        replicas=2,
        min_replicas=2,
        envs={variable: value},
        recovery={"max_restarts": 0},
    )

    done = workbench.cli("up", str(job), timeout_s=90)

    assert done.returncode == 4, done.stderr
    screen = "\n".join((done.stdout + done.stderr).splitlines()[-24:])
    assert f"{variable} is {value!r}" in screen, screen
    assert "this host has " in screen
    assert "lo" in screen.partition("this host has ")[2].splitlines()[0]
    (begun, *_) = (one["wall_ms"] for one in workbench.events("nowhere") if one["event"] == "rank_spawned")
    ended = next(one["wall_ms"] for one in workbench.events("nowhere") if one["event"] == "rank_exited")
    assert ended - begun < 60_000, "nobody waits for a quorum or a connection first"
