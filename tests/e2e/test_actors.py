"""`launch_hosts` on a real Slurm: actors on nodes, one of which is switched off, and nothing left in the end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import INFRA, Client
from tests.e2e.site import Site
from tests.support.processes import pids, with_variable
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

NAME = "acts"
PROGRAM = """
import json, os, sys
import sky_monarch as sm
import sky_monarch.actor as face
from sky_monarch.actor import Actor, endpoint

class Where(Actor):
    @endpoint
    def node(self) -> str:
        return os.environ["SLURMD_NODENAME"]

    @endpoint
    def ask(self, other) -> str:
        return other.node.call_one().get(60)

    @endpoint
    def sees(self) -> list[str]:
        return sorted(name for name in os.environ if "KEYS" in name)

def say(**what):
    print(json.dumps(what), flush=True)

def hook(failure):
    say(lost=list(failure.crashed_ranks), host=failure.host, why=failure.reason, lines=failure.last_lines)

face.unhandled_fault_hook = hook
resources = {"accelerators": "MI300X:1", "cpus": "2+", "memory_gib": "4+"}
with sm.launch_hosts(
    2, name="@JOB@", infra=sys.argv[1], resources=resources, listen="127.0.0.1:0", timeout=900,
    workdir=sys.argv[2], fields={"doctor": "off"},
) as hosts:
    mesh = hosts.spawn_procs().spawn("where", Where)
    say(names=hosts.names, nodes=list(mesh.node.call().get(60).values()))
    left, right = mesh.slice(hosts=0), mesh.slice(hosts=1)
    say(asked=left.ask.call_one(right).get(60), sees=left.sees.call_one().get(60))
    sys.stdin.readline()
    mesh.respawn(1, timeout=600)
    say(names=hosts.names, nodes=list(mesh.node.call().get(60).values()))
    say(asked=left.ask.call_one(right).get(60))
    sys.stdin.readline()
say(over=True)
""".replace("@JOB@", NAME)


@pytest.fixture
def program(client: Client) -> Iterator[subprocess.Popen[str]]:
    """A program that has launched two hosts."""
    folder = client.folder / NAME
    folder.mkdir()
    client.names.append(NAME)
    with (client.folder / f"{NAME}.err").open("wb") as errors:
        started = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, INFRA, str(folder)],
            env=client.env,
            cwd=client.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=60)


def heard(program: subprocess.Popen[str], client: Client) -> dict[str, Any]:
    """The next thing that the program says."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, (client.folder / f"{NAME}.err").read_text()[-4000:]
    found: dict[str, Any] = json.loads(line)
    return found


def go_on(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def test_a_program_has_its_actors_on_nodes_gets_a_lost_one_back_and_leaves_nothing(
    site: Site, client: Client, program: subprocess.Popen[str]
) -> None:
    first = heard(program, client)
    assert "lost" not in first, first
    assert first["names"] == [f"{NAME}-0", f"{NAME}-1"]
    assert len(set(first["nodes"])) == 2
    assert heard(program, client) == {"asked": first["nodes"][1], "sees": []}
    run_id = client.run_folder(NAME).name
    jobs = client.host_jobs(NAME)
    assert sorted(job.node for job in jobs.values()) == sorted(first["nodes"])
    key = json.loads((client.run_folder(NAME) / "private.json").read_text())["secrets"]["ACTOR_KEYS"]
    for pid in pids():
        with contextlib.suppress(OSError):
            assert key[:40].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    written = [path for path in client.run_folder(NAME).rglob("*") if path.is_file()]
    shown = [
        path for path in written if path.name != "private.json" and key[:40].encode() in path.read_bytes()
    ]
    assert not shown, "the keys are in no task, log or state"

    site.slurm.kill_node(first["nodes"][1])

    lost = heard(program, client)
    assert (lost["lost"], lost["host"]) == ([1], f"{NAME}-1"), lost
    go_on(program)
    again = heard(program, client)
    assert again["nodes"][0] == first["nodes"][0], "the other one was not touched"
    assert again["nodes"][1] not in first["nodes"]
    assert heard(program, client) == {"asked": again["nodes"][1]}
    site.slurm.start_node(first["nodes"][1])

    go_on(program)
    assert heard(program, client) == {"over": True}

    assert program.wait(60) == 0
    said = (client.folder / f"{NAME}.err").read_text()
    assert f"{NAME} has ended: " in said
    assert "hosts are down" in said
    assert client.status(NAME)["state"] == "SUCCEEDED", client.status(NAME)["reason"]
    eventually(lambda: not site.slurm.jobs(named=f"{NAME}-h"), within_s=30, what="the queue is empty")
    eventually(lambda: not with_variable("SKY_MONARCH_RUN_ID", run_id), within_s=15)
    client.names.remove(NAME)
