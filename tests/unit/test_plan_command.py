"""``sky-monarch plan`` and ``up`` for what is not this machine, as a user types them; and the templates."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner

from sky_monarch.cli import app, up
from sky_monarch.config import check_job
from sky_monarch.launch import skypilot
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.review import review
from sky_monarch.sdk import _up

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "task_templates").glob("*.yaml"))
JOB = """\
name: demo
replicas: 4
ranks_per_replica: 2
infra: runpod
resources: {accelerators: MI300X:2, ordered: [{use_spot: true}, {infra: oci}, {infra: do, use_spot: true}]}
secrets: {TOKEN: canary}
run: python train.py
"""

#: RunPod alone: all groups share one pod, so that a head there would be lost with them.
ALONE = JOB.replace(", ordered: [{use_spot: true}, {infra: oci}, {infra: do, use_spot: true}]", "")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)

    def call(*words: str, code: int = 0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        assert "\x1b" not in done.output
        assert "canary" not in done.output
        assert not (tmp_path / "state").exists(), "a plan writes nothing"
        return done

    return call


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").touch()


def documents(text: str, version: tuple[int, int] = (1, 1)) -> list[dict]:
    reader = YAML(typ="safe", pure=True)
    reader.version = version
    return list(reader.load_all(text))


def test_the_plan_shows_candidates_in_order_with_price_and_day_and_the_tasks_of_the_first(run):
    shown = run("plan", "job.yaml").stdout

    table = [line.split() for line in shown.splitlines() if "MI300X:8" in line and "(" in line]
    assert [row[:2] for row in table] == [["1", "runpod"], ["2", "oci"]]
    assert "19.12" in table[0]
    assert "48.04" in table[1]
    assert all(row[-1].startswith("20") for row in table), "the day of the price"
    assert "refused: MI300X:2 spot on do: DigitalOcean has no spot capacity; leave use_spot out" in shown
    assert "demo-h0" in shown
    assert "lighthouse and controller: on demo-h0" in shown
    assert "1: no price for spot was read for RunPod: $/H is that of on-demand capacity" in shown


def test_what_is_shown_as_yaml_is_exactly_the_plan(run):
    values = json.loads(run("plan", "job.yaml", "--json").stdout)
    for number, choice in enumerate(values["choices"], start=1):
        text = run("plan", "job.yaml", "--yaml", "--candidate", str(number)).stdout
        assert documents(text) == [entry["task"] for entry in choice["tasks"]]
        assert text.startswith("# `up` adds what only a run knows: file_mounts (this sky-monarch), ")
    shown = run("plan", "job.yaml").stdout
    assert documents(shown[shown.index("---\n") :]) == documents(run("plan", "job.yaml", "--yaml").stdout)


def test_the_name_of_the_run_is_that_of_its_clusters(run):
    values = json.loads(run("plan", "job.yaml", "--json", "--name", "other").stdout)

    assert values["choices"][0]["hosts"][0]["cluster"] == "other-h0"


@pytest.fixture
def with_skypilot(monkeypatch):
    monkeypatch.setattr(skypilot, "installed", lambda: True)


def test_a_dry_run_elsewhere_is_the_same_plan_with_what_hosts_would_get(run, tmp_path, with_skypilot, script):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/big.bin").write_bytes(b"x" * 100)
    (tmp_path / ".gitignore").write_text("data\n")

    dry = run("up", "job.yaml", "--dry-run")

    plan = run("plan", "job.yaml").stdout
    assert dry.stdout.startswith(plan)
    size = len(JOB) + len("data\n")
    assert f"each host gets 3 files, {size} B of {tmp_path}" in plan
    assert ".whl" in dry.stdout.removeprefix(plan)
    assert "nothing was started" in dry.stderr
    values = json.loads(run("up", "job.yaml", "--dry-run", "--json").stdout)
    ship, planned = values.pop("ship"), json.loads(run("plan", "job.yaml", "--json").stdout)
    assert planned.pop("ship").items() <= ship.items()
    assert values == planned
    assert (ship["files"], ship["bytes"]) == (3, size)


def test_a_plan_shows_what_would_travel_before_anything_does(run, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/weights.bin").open("wb") as file:
        file.truncate(2 << 30)  # sparse
    (tmp_path / ".venv/lib").mkdir(parents=True)
    (tmp_path / ".venv/pyvenv.cfg").touch()
    for index in range(20_000):
        (tmp_path / f".venv/lib/{index}.py").touch()
    looked, scan = [], os.scandir

    def scandir(folder="."):
        looked.append(str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)

    plan = run("plan", "job.yaml")

    assert str(tmp_path / ".venv/lib") in looked
    assert "each host gets 20,003 files, 2.0 GiB" in plan.stdout
    assert "largest of it: data 2.0 GiB" in plan.stdout
    assert "warning: each host gets a copy of the working folder, 2.0 GiB" in plan.stderr
    assert "warning: virtual environments are of no use on a host" in plan.stderr
    assert ".venv" in plan.stderr
    assert "warning:" not in run("plan", "job.yaml", "--yaml").stderr
    looked.clear()
    run("validate", "job.yaml")
    assert str(tmp_path / ".venv/lib") not in looked, "it looks at no file of it"


def test_a_plan_and_a_dry_run_say_what_up_leaves_out(run, with_skypilot, script):
    for words in (["plan", "job.yaml"], ["up", "job.yaml", "--dry-run"]):
        done = run(*words)
        assert "note: `up` leaves out MI300X:8 spot on runpod" in done.stderr
        assert "leaves out" not in done.stdout, "of which `sky launch` takes the tasks"
    values = json.loads(run("plan", "job.yaml", "--json").stdout)
    assert values["up"]["refusals"] == []
    assert "MI300X:8 spot on runpod" in values["up"]["left_out"][0]


APART = "placement: any\nsync: diloco(20)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALONE, "lighthouse and controller would run on demo-h0, with all groups, and be lost with them"),
        (
            JOB.replace("infra: runpod", "infra: oci\nhead: api-server").partition("resources")[0]
            + "run: python train.py\nsecrets: {TOKEN: canary}\n",
            "runs requests and its administrator's plugins",
        ),
        (
            ALONE.replace("MI300X:2", "MI300X:4").replace("secrets", f"{APART}head: cluster\nsecrets"),
            "nobody could dial a head that is one of them",
        ),
        (
            ALONE.replace("MI300X:2", "MI300X:4").replace("secrets", f"{APART}lighthouse: torchft\nsecrets"),
            "TorchFT's lighthouse knows no rendezvous that a tunnel reaches",
        ),
        (
            ALONE.replace("infra: runpod", "infra: slurm\nlighthouse: torchft"),
            "TorchFT's knows no authentication",
        ),
        ("name: x\nreplicas: 2\nrun: x\nhead: api-server\nsecrets: {T: canary}\n", "has its head here"),
        (
            "name: x\nreplicas: 2\nrun: x\nrecovery: {spare: 1}\nsecrets: {T: canary}\n",
            "no hosts that could be lost",
        ),
    ],
    ids=["lost-head", "api-server", "tunnel-head", "tunnel-torchft", "torchft", "local-head", "local-spare"],
)
def test_what_up_refuses_plan_and_a_dry_run_say_in_its_words_and_with_its_exit_code(
    run, tmp_path, with_skypilot, text, words
):
    (tmp_path / "job.yaml").write_text(text)

    refused = run("up", "job.yaml", "--head-address", "127.0.0.1", code=2).stderr
    error = next(line for line in refused.splitlines() if line.startswith("error: "))
    assert words in error

    planned = run("plan", "job.yaml", code=2)
    assert f"note: `up` would refuse: {error.removeprefix('error: ')}" in planned.stderr
    assert "plan " in planned.stdout, "it is shown all the same"
    assert error.removeprefix("error: ") in [
        one["message"]
        for one in json.loads(run("plan", "job.yaml", "--json", code=2).stdout)["up"]["refusals"]
    ]
    dry = run("up", "job.yaml", "--dry-run", "--head-address", "127.0.0.1", code=2)
    assert error.removeprefix("error: ") in dry.stderr
    assert "nothing was started" not in dry.stderr


def test_a_dry_run_goes_the_way_of_up_to_its_end(run, tmp_path, with_skypilot, script):
    (tmp_path / "job.yaml").write_text(ALONE)

    said = run("up", "job.yaml", "--dry-run", "--head", "here", "--head-address", "127.0.0.1").stderr
    assert "`up` would" not in said
    assert "nothing was started (--dry-run)" in said
    for more, words in (
        (["--inject", "kill:replica=9"], "replica"),
        (["--head-address", "192.0.2.1"], "192.0.2.1"),
    ):
        said = run("up", "job.yaml", "--dry-run", "--head", "here", *more, code=2).stderr
        assert "note: `up` would refuse: " in said
        assert words in said


@pytest.mark.skipif(skypilot.installed(), reason="SkyPilot is installed here")
def test_a_plan_names_what_a_launch_needs_here_and_needs_none_of_it(run, tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(SLURM)
    missing = "`up` would not start from this machine: hosts are launched by SkyPilot, which is not installed"

    assert missing in run("plan", "job.yaml").stderr
    assert missing in run("up", "job.yaml", "--dry-run", code=2).stderr

    monkeypatch.setattr(
        "sky_monarch.config.checkpoint_target.require_client.__kwdefaults__", {"find": lambda _: None}
    )
    stored = "replicas: 2\nrun: 'true'\nsecrets: {T: canary}\ncheckpoint: {to: s3://bucket/job, every_steps: 200}\n"
    (tmp_path / "job.yaml").write_text(f"name: here\n{stored}")
    planned = run("plan", "job.yaml").stderr
    assert (
        "checkpoint.to: s3:// needs fsspec, which is not installed; pip install 'sky-monarch[s3]'" in planned
    )
    assert "s3:// needs fsspec" in run("up", "job.yaml", code=2).stderr
    (tmp_path / "job.yaml").write_text(f"name: there\ninfra: k8s\n{stored}")
    planned = run("plan", "job.yaml")
    assert "checkpoint.to needs s3fs on each host" in planned.stdout, "whatever is here"
    assert "s3://" not in planned.stderr


def test_up_elsewhere_is_refused_after_the_plan_was_checked(run, tmp_path):
    (tmp_path / "job.yaml").write_text(ALONE)
    refused = run("up", "job.yaml", code=2)
    assert "lighthouse and controller would run on demo-h0" in refused.stderr
    assert "write head: here" in refused.stderr
    error = json.loads(run("up", "job.yaml", "--json", code=2).stdout)["error"]
    assert error["kind"] == "ConfigError", "H49: with --json stdout parses"

    (tmp_path / "job.yaml").write_text(
        JOB.replace("ranks_per_replica: 2", "ranks_per_replica: 4").replace(
            "MI300X:2, ordered: [{use_spot: true}, {infra: oci}, {infra: do, use_spot: true}]", "MI300X:4"
        )
    )
    refused = run("up", "job.yaml", code=2)
    assert "4 groups need 2 hosts of RunPod" in refused.stderr, "what is wrong with it comes first"
    assert "hint:" in refused.stderr


SLURM = "name: demo\nreplicas: 2\ninfra: slurm\nresources: {accelerators: MI300X:1}\nsecrets: {TOKEN: canary}\nrun: x\n"


@pytest.mark.skipif(skypilot.installed(), reason="SkyPilot is installed here")
def test_without_skypilot_up_elsewhere_says_how_to_get_it(run, tmp_path):
    (tmp_path / "job.yaml").write_text(SLURM)

    refused = run("up", "job.yaml", "--head-address", "127.0.0.1", "--yes", code=2)

    assert "SkyPilot, which is not installed" in refused.stderr
    assert "pip install 'sky-monarch[sky]'" in refused.stderr


def test_up_elsewhere_shows_what_it_launches_and_ships_and_goes_no_further_without_a_yes(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(skypilot, "installed", lambda: True)
    (tmp_path / "job.yaml").write_text(SLURM)
    (tmp_path / "outer").symlink_to("/etc/hostname")

    refused = run("up", "job.yaml", "--head-address", "127.0.0.1", code=2)

    assert "slurm" in refused.stderr
    assert f"each host gets 2 files, {len(SLURM)} B of {tmp_path}" in refused.stderr
    assert "hosts dial this machine at 127.0.0.1" in refused.stderr
    assert "warning: 127.0.0.1 is reached from this machine only" in refused.stderr
    assert (
        "warning: symbolic links that lead out of the working folder lead nowhere on a host: outer"
        in refused.stderr
    )
    assert "hint: give -y" in refused.stderr
    assert refused.stdout == ""
    error = json.loads(run("up", "job.yaml", "--head-address", "127.0.0.1", "--json", code=2).stdout)
    assert error["error"]["hint"] == "give -y", "H49"


def test_a_head_that_is_a_cluster_is_shown_and_has_an_address_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.setattr(skypilot, "installed", lambda: True)
    (tmp_path / "job.yaml").write_text(SLURM.replace("slurm", "k8s"))

    refused = run("up", "job.yaml", code=2)
    assert "lighthouse and controller run on demo-head, which is launched first" in refused.stderr
    assert "hint: give -y" in refused.stderr
    refused = run("up", "job.yaml", "--head-address", "127.0.0.1", code=2)
    assert "the head is the cluster demo-head, which knows its own address" in refused.stderr
    refused = run("up", "job.yaml", "--head", "api-server", code=2)
    assert "no process of a run's own" in refused.stderr
    assert "write head: cluster" in refused.stderr
    assert "hint: here, cluster or api-server" in run("up", "job.yaml", "--head", "moon", code=2).stderr


def test_a_run_of_this_machine_alone_has_its_head_here(run, tmp_path):
    (tmp_path / "job.yaml").write_text(
        "name: demo\nreplicas: 2\nrun: x\nhead: cluster\nsecrets: {TOKEN: canary}\n"
    )

    refused = run("up", "job.yaml", code=2)

    assert "a run of this machine alone has its head here" in refused.stderr
    assert "--hosts N" in refused.stderr


@pytest.mark.parametrize(
    ("answer", "goes_on"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_only_a_yes_launches(tmp_path, monkeypatch, capsys, answer, goes_on):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(skypilot, "installed", lambda: True)
    (tmp_path / "job.yaml").write_text(SLURM)
    job = check_job(tmp_path / "job.yaml").job
    assert job is not None
    plan = _up.plan_run(job, address="127.0.0.1")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)

    if goes_on:
        up._announce(plan, yes=False)
    else:
        with pytest.raises(typer.Exit) as left:
            up._announce(plan, yes=False)
        assert left.value.exit_code == 130
    said = capsys.readouterr().err
    assert "launch 2 hosts at a price that is not known? [y/N]: " in said
    assert ("nothing was started" in said) is not goes_on


def test_an_error_is_json_where_json_was_asked_for(run, tmp_path):
    (tmp_path / "job.yaml").write_text(
        JOB.replace("infra: runpod", "infra: aws").replace("{infra: oci}, ", "")
    )
    error = json.loads(run("plan", "job.yaml", "--json", code=2).stdout)["error"]

    assert "nothing is known of this place" in error["message"]


def test_a_candidate_that_is_not_there_is_refused(run):
    said = run("plan", "job.yaml", "--candidate", "3", code=2).stderr

    assert "there is no candidate 3" in said
    assert "--candidate takes 1 (MI300X:8 spot on runpod), 2 (MI300X:8 on oci)" in said


def test_a_local_job_is_planned_without_tasks(run, tmp_path):
    (tmp_path / "job.yaml").write_text("name: here\nreplicas: 2\nrun: python train.py\n")

    assert "lighthouse and controller: here" in run("plan", "job.yaml").stdout
    assert json.loads(run("plan", "job.yaml", "--json").stdout)["choices"][0]["tasks"] == []


def test_a_plan_needs_neither_skypilot_nor_a_network(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    code = (
        "import sys, socket\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('sky', 'torch'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "def connect(*_): raise AssertionError('a plan asks nobody')\n"
        "socket.socket.connect = connect\n"
        "sys.argv = ['sky-monarch', 'plan', 'job.yaml']\n"
        "from sky_monarch.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "8x_MI300X_SECURE" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--dry-run"], 0, "nothing was started (--dry-run)"),
        ([], 2, "hint: give -y"),
        (["--json"], 2, "hint: give -y"),
    ],
    ids=["dry-run", "unasked", "unasked-json"],
)
def test_up_without_a_terminal_and_a_network_waits_for_nobody_and_leaves_its_state_as_it_was(
    tmp_path, more, code, words
):
    (tmp_path / "job.yaml").write_text(SLURM)
    ended = tmp_path / "state/runs/old-20261130-120000-abcd"
    ended.mkdir(parents=True)
    (ended / "run.json").write_text('{"run_id": "old-20261130-120000-abcd", "name": "old"}')
    (ended / "final.json").write_text('{"run_id": "old-20261130-120000-abcd", "state": "SUCCEEDED"}')

    def state() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in [tmp_path / "state", *(tmp_path / "state").rglob("*")]
        }

    before = state()
    command = (
        "import socket, sys\n"
        "def connect(*_): raise AssertionError('it asks somebody')\n"
        "look_up = socket.getaddrinfo\n"
        "def numbers(*words, **more): return look_up(*words, **{**more, 'flags': socket.AI_NUMERICHOST})\n"
        "socket.socket.connect, socket.getaddrinfo = connect, numbers\n"
        "from sky_monarch.launch import skypilot\n"
        "skypilot.installed = lambda: True\n"
        "from sky_monarch.__main__ import main\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, "up", "job.yaml", "--head-address", "127.0.0.1", *more],
        cwd=tmp_path,
        env={**os.environ, "SKY_MONARCH_STATE_DIR": str(tmp_path / "state")},
        stdin=subprocess.PIPE,  # open, and nobody writes: who asks waits for ever
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            assert process.wait(60) == code, process.stderr.read()
            said = process.stderr.read()
        finally:
            process.kill()
    assert words in said
    assert "asks somebody" not in said
    assert state() == before


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_each_template_is_a_valid_job_that_is_planned_and_short_enough_to_read(path):
    checked = check_job(path)
    assert checked.problems == ()
    assert checked.job is not None
    assert len(path.read_text().splitlines()) <= 40

    said = review(checked.job)
    found = said.plan

    assert (said.refusals, said.left_out) == ((), ()), "`up` takes it as it is"
    assert found.refused == ()
    for choice in found.choices:
        assert sorted(group for host in choice.hosts for group in host.groups) == list(
            range(checked.job.replicas)
        )


def test_the_templates_go_where_they_say():
    def planned(name):
        job = check_job(ROOT / f"task_templates/{name}.yaml").job
        assert job is not None
        return plan_clusters(job).choices

    spot, on_demand = planned("neocloud-spot")
    assert (spot.use_spot, on_demand.use_spot) == (True, False)
    assert [host.groups for host in spot.hosts] == [(0, 1, 2, 3)], "one pod"
    assert [len(host.groups) for host in planned("slurm")[0].hosts] == [1, 1, 1]
    assert planned("kubernetes")[0].accelerator == "MI300X:8"
