"""Runs with hosts, as clients see them: what is shown, what ``down`` says may still bill, whose version counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sky_monarch
from sky_monarch.controller.tunnel import tunnelled_bytes
from sky_monarch.errors import ChannelError, LaunchError
from sky_monarch.launch import local
from sky_monarch.launch.folder import Phase, RunFolder, write_json
from sky_monarch.sdk import Run, _api

DOUBLE = Path(__file__).with_name("controller_double.py")
HOSTS = [
    {
        "host": "x-h0",
        "groups": [0],
        "attempt": 1,
        "phase": "UP",
        "place": "slurm/loop/gpu",
        "usd_per_hour": 3.2,
        "cost_usd": 1.5,
        "wasted_usd": 0.0,
        "since_ms": 1,
    },
    {
        "host": "x-h1",
        "groups": [1],
        "attempt": 2,
        "phase": "WAITING",
        "reason": "no \x1b[31mcapacity",
        "cost_usd": 0.5,
    },
    {"host": "x-h2", "groups": [2], "attempt": 1, "phase": "UP", "stops_in_s": 21.7},
]


@pytest.fixture
def env(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path / "s"))
    kept = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    return {**kept, "TERM": "xterm", "COLUMNS": "200"}


@pytest.fixture
def cli(env, tmp_path):
    def call(*arguments: str):
        command = [sys.executable, "-m", "sky_monarch", *arguments]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return call


@pytest.fixture
def folder(env, tmp_path):
    """A live run with two hosts, of which a double stands for agent and controller."""
    with subprocess.Popen(
        [sys.executable, DOUBLE, tmp_path / "s", "x"], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        found = RunFolder(tmp_path / "s/runs" / process.stdout.readline().strip())
        write_json(found.path / "run.json", {**found.info, "provider": "skypilot", "hosts": ["x-h0", "x-h1"]})
        yield found
        process.kill()


def ended(folder: RunFolder, **final) -> None:
    write_json(
        folder.path / "final.json", {"run_id": folder.run_id, "name": "x", "state": "CANCELLED", **final}
    )
    agent = folder.agent()
    assert agent is not None
    assert local.reap(folder, grace_s=1) == []


def test_status_shows_where_each_host_is_and_what_it_has_cost(cli, folder):
    money = {"hosts": HOSTS, "cost_usd": 2.0, "wasted_usd": 0.5, "stops_in_s": 7500.0}
    (folder.path / "status.json").write_text(json.dumps({"replicas": 2, **money}))

    lines = cli("status", "x").stdout.splitlines()

    assert lines[1].split() == ["HOST", "GROUPS", "PLACE", "ATTEMPT", "PHASE", "FOR", "$/H", "COST", "REASON"]
    assert lines[2].split()[:5] == ["x-h0", "0", "slurm/loop/gpu", "1", "UP"]
    assert "3.20" in lines[2]
    assert "1.50 $" in lines[2]
    assert lines[3].endswith("no capacity")
    assert "  UP, stops in 22 s  " in lines[4]
    assert "cost so far 2.00 $, of which 0.50 $ brought no step" in lines
    assert "its budget ends it in 2h 05m, if hosts and prices stay as they are" in lines
    table = cli("status").stdout.splitlines()
    assert table[0].split()[-3:] == ["HOSTS", "COST", "RUN"]
    assert table[1].split()[-4:-1] == ["2/3", "2.00", "$"]
    shown = json.loads(cli("status", "x", "--json").stdout)
    assert [host["phase"] for host in shown["hosts"]] == ["UP", "WAITING", "UP"]
    assert [host["stops_in_s"] for host in shown["hosts"]] == [None, None, 21.7]
    assert (shown["cost_usd"], shown["wasted_usd"]) == (2.0, 0.5)


def test_the_output_of_hosts_that_are_gone_is_not_called_empty(cli, folder):
    ended(folder)
    write_json(folder.path / "job.json", {"setup": "pip list"})

    for words in ((), ("--setup",)):
        shown = cli("logs", "x", *words)
        assert (shown.returncode, shown.stdout) == (0, "")
        assert "nothing of what was printed has reached the head" in shown.stderr
        assert "`sky-monarch events` has the last lines" in shown.stderr


def test_the_output_of_hosts_is_still_there_when_they_are_gone(cli, folder):
    parts = {"r0-0/g1": "one", "r0-0/g2": "two", "r1-0/g1": "other"}
    for place, word in parts.items():
        file = folder.path / "logs" / f"{place}-000000000000.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{word}\n")
    ended(folder)

    assert cli("logs", "x").stdout.splitlines() == ["[0/0] one", "[0/0] two", "[1/0] other"]
    assert cli("logs", "x", "--replica", "0", "--rank", "0").stdout == "one\ntwo\n"
    assert cli("logs", "x", "--generation", "2").stdout == "[0/0] two\n"


def test_what_became_of_a_host_is_one_line_of_the_events(cli, folder):
    event = {"id": 1, "wall_ms": 0, "event": "host_report", "host": "x-h1", "attempt": 2}
    reports = [
        {**event, "state": "launched", "place": "slurm/loop/gpu", "usd_per_hour": 3.2},
        {**event, "id": 2, "state": "failed", "kind": "capacity", "reason": "all nodes are taken"},
    ]
    (folder.path / "events.ndjson").write_text("".join(json.dumps(one) + "\n" for one in reports))

    lines = cli("events", "x").stdout.splitlines()

    assert lines[0].endswith("host x-h1, attempt 2: launched (slurm/loop/gpu, 3.20 $/h)")
    assert lines[1].endswith("host x-h1, attempt 2: failed (capacity): all nodes are taken")


def test_what_was_not_seen_to_end_may_bill(folder):
    assert Run(folder).may_bill() == (), "it is live: its controller knows better"
    ended(folder, hosts=[{**HOSTS[0], "phase": "DOWN"}, HOSTS[1]])

    assert Run(folder).may_bill() == ("x-h1-a2",), "it was at its second attempt"
    write_json(
        folder.path / "requests.json",
        {"hosts": {"x-h1": {"host": "x-h1", "attempt": 3}}, "older": [{"host": "x-h1", "attempt": 2}]},
    )
    assert Run(folder).may_bill() == ("x-h1-a2", "x-h1-a3"), "each attempt is a cluster of its own"


def test_a_cluster_that_is_known_to_stand_may_bill_also_where_its_host_counts_as_down(folder):
    ended(folder, hosts=[{**host, "phase": "DOWN"} for host in HOSTS])
    records = {
        "x-h0": {"host": "x-h0", "attempt": 2, "phase": "up", "choice": 0},
        "x-h1": {"host": "x-h1", "attempt": 3, "phase": "failed", "choice": 0, "left": "answered 503"},
        "x-h2": {"host": "x-h2", "attempt": 1, "phase": "failed", "choice": 0, "left": ""},
        "x-h3": {"host": "x-h3", "attempt": 1, "phase": "ended", "choice": 0},
        "x-h4": {"host": "x-h4", "attempt": 1, "phase": "launching", "choice": None},
        "x-h5": {"host": "x-h5", "attempt": 1, "phase": "launching", "choice": 0},
    }
    older = [{"host": "x-h0", "attempt": 1, "phase": "ended", "choice": 0}]
    down = [{"host": host, "phase": "DOWN", "groups": []} for host in records]
    final = folder.final or {}
    write_json(folder.path / "final.json", {**final, "hosts": down})
    write_json(folder.path / "requests.json", {"hosts": records, "older": older})
    assert Run(folder).may_bill() == ("x-h0", "x-h0-a2", "x-h1-a3", "x-h5")


def test_purge_waits_for_nobody_and_names_what_may_still_bill(cli, folder):
    (folder.path / "silent").touch()  # the controller does not answer

    done = cli("down", "x", "--purge", "--grace", "1")

    assert done.returncode == 0, done.stderr
    assert "ended (CANCELLED)" in done.stdout
    assert "may still bill: x-h0, x-h1; `sky down x-h0 x-h1` ends them" in done.stderr
    assert folder.phase() is Phase.ENDED
    assert "hosts were not waited for" in (folder.final or {})["reason"]
    again = cli("down", "x", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)[0]["state"] == "CANCELLED"
    assert "may still bill" in again.stderr, "twice is fine, and it is said again"


def test_down_without_hosts_left_says_nothing_of_bills(cli, folder):
    ended(folder, hosts=[{**host, "phase": "DOWN"} for host in HOSTS])

    done = cli("down", "x")

    assert done.returncode == 0
    assert "bill" not in done.stderr
    assert "already gone" in done.stdout


def test_a_run_of_another_version_is_not_taken_up_again(env, tmp_path):
    path = tmp_path / "s/runs/x-20261130-120000-abcd"
    path.mkdir(parents=True)
    files = {
        "run.json": {"run_id": path.name, "name": "x", "version": "9.9.9", "created_ms": 1},
        "private.json": {"token": "t"},
        "job.json": {"name": "x"},
        "controller.json": {},
        "agent.json": {"services": [{"argv": ["/nowhere/python"]}]},
    }
    for name, content in files.items():
        write_json(path / name, content)

    with pytest.raises(LaunchError, match=r"sky-monarch 9\.9\.9") as caught:  # H56
        local.resume(RunFolder(path), ready=lambda _: True)

    assert sky_monarch.__version__ in str(caught.value)
    assert "pip install sky-monarch==9.9.9" in (caught.value.hint or "")


@pytest.mark.parametrize("launched", ["0.0.9", "9.9.9"], ids=["older", "newer"])
@pytest.mark.parametrize("reached", ["here", "here, in another environment", "on a cluster"])
def test_what_a_run_of_another_version_refuses_is_said_in_one_line_with_both_and_the_remedy(  # H56
    cli, folder, launched, reached
):
    write_json(folder.path / "run.json", {**folder.info, "version": launched})
    python = sys.executable if reached == "here" else "/opt/other/bin/python"
    write_json(folder.path / "agent.json", {"services": [{"argv": [python]}]})
    if reached == "on a cluster":
        write_json(folder.path / "run.json", {**folder.info, "head": "x-head"})
    remedy = f"`pip install sky-monarch=={launched}`"
    if "environment" in reached:
        remedy = "`/opt/other/bin/python -m sky_monarch` is the one that launched it"

    said = str(_api.failure(folder, 404, b"no such route"))
    assert said.startswith("the controller answered 404; ")
    assert (
        f"{folder.run_id} was launched by sky-monarch {launched}, and this is {sky_monarch.__version__}"
        in said
    )
    assert remedy in (_api.failure(folder, 404, b"no such route").hint or "")
    for odd in (b"[]", b'{"hosts": 5}', b'{"groups": [[]]}'):
        with pytest.raises(ChannelError, match=r"cannot be read; .* was launched by"):
            _api.status_of(folder, odd)
    if reached != "on a cluster":
        (folder.path / "status.json").write_text('{"groups": [[]]}')
        done = cli("status", "x", "--json")
        assert done.returncode == ChannelError.exit_code
        error = json.loads(done.stdout)["error"]
        assert launched in error["message"]
        assert sky_monarch.__version__ in error["message"]
        assert remedy in error["hint"]
        assert "Traceback" not in done.stderr


def test_what_a_run_of_this_version_refuses_says_nothing_of_versions(folder):
    write_json(folder.path / "run.json", {**folder.info, "version": sky_monarch.__version__})

    assert str(_api.failure(folder, 404, b"")) == "the controller answered 404"
    busy = _api.failure(folder, 409, b'{"error": {"message": "its agent is away", "hint": null}}')
    assert str(busy) == "its agent is away"


def test_bytes_of_the_tunnel_are_those_of_all_hosts_and_none_where_nobody_counts_them(tmp_path) -> None:
    assert tunnelled_bytes(tmp_path) is None
    counts = {"hosts": {"demo-h0": {"sent": 5, "received": 7}, "demo-h1": {"sent": 1, "received": 0}}}
    (tmp_path / "tunnel.json").write_text(json.dumps(counts))
    assert tunnelled_bytes(tmp_path) == 13
    for damaged in ("", "[]", '{"hosts": 1}', '{"hosts": {"h": {"sent": "x", "received": 1}}}'):
        (tmp_path / "tunnel.json").write_text(damaged)
        assert tunnelled_bytes(tmp_path) is None, damaged
