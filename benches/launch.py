"""What it costs to launch, to look at a run, and to get a lost node's group back on a real Slurm.

``plan``  `sky-monarch plan` without a network, beside `import sky` and beside itself with SkyPilot's catalogs.
``reads``  `status`, `events` and `logs` of a run, and, with the cluster, `sky status` and `sky logs`.
``spare``  (root, and the packages of tests/e2e) A run of three groups and a spare host on five nodes. Each node runs a
bare SkyPilot cluster once, which is removed again; then nodes of the run are switched off, whose groups go on on the
spare: seconds from the loss to the first commit there, beside the bare launch on that very node. ``--torch`` trains the
quickstart's model instead of torch-free ranks.
``slurm``  (root, and the packages of tests/e2e) Rounds on one cluster of four nodes, a run of three groups on it.
Each round launches one bare SkyPilot cluster on the spare node and removes it, then switches a node of the run off,
whose group comes back on that same spare node. At the end the whole of a bare three-node cluster is lost with one
node and launched again, by the steps of `sky jobs`: a look every 15 s, then everything anew. (`sky jobs` itself
recovers nothing without the internet: it asks 1.1.1.1 first.)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.cli_start import cpu_s
from benches.report import emit
from tests.support.runs import FREE_RANK, ROOT, Workbench
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.e2e.client import Client
    from tests.e2e.site import Site

PARTS = ("plan", "reads", "slurm", "spare")
REPEATS, ROUNDS = 7, 3
LOOK_S = 15.0
_SKY = ROOT / ".venv-sky/bin/python"


def run(arguments: Sequence[str] = ()) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benches launch", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="lost nodes (default: %(default)s)")
    parser.add_argument("--torch", action="store_true", help="`spare` with torch in the ranks")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sky") is None:
        if not _SKY.exists():
            print("error: SkyPilot is not here. Fix: make test-sky", file=sys.stderr)
            return 1
        return subprocess.run([str(_SKY), "-m", "benches", "launch", *arguments], check=False).returncode
    parts = options.part or PARTS
    if "plan" in parts:
        measure_plan()
    if "reads" in parts:
        measure_reads()
    if {"slurm", "spare"} & set(parts):
        from tests.e2e.slurm import NotHereError, check_this_machine

        try:
            check_this_machine()
        except NotHereError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if "spare" in parts:
            measure_spare(options.rounds, torch=options.torch)
        if "slurm" in parts:
            measure_slurm(options.rounds)
    return 0


def _interleaved(peers: Mapping[str, list[str]], env: Mapping[str, str]) -> dict[str, list[float]]:
    """Processor seconds of each command line, ``REPEATS`` times in turn.

    Everything is compiled before, as installed packages are: some environments keep Python from writing bytecode.
    """
    costs: dict[str, list[float]] = {name: [] for name in peers}
    with tempfile.TemporaryDirectory() as compiled:
        whole = {**os.environ, "NO_COLOR": "1", **env, "PYTHONPYCACHEPREFIX": compiled}
        whole.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(REPEATS + 1):
            for name, argv in peers.items():
                cost_s = cpu_s(argv, whole)
                if number:
                    costs[name].append(cost_s)
    return costs


def measure_plan() -> None:
    """`plan`, with and without SkyPilot's own catalogs, beside the import of SkyPilot."""
    from tests.unit.test_skypilot_tasks import write_catalogs

    job = str(ROOT / "task_templates/neocloud-spot.yaml")
    plan = [sys.executable, "-m", "sky_monarch", "plan", job]
    with tempfile.TemporaryDirectory() as home:
        write_catalogs(Path(home))
        peers = {
            "import sky": [sys.executable, "-c", "import sky"],
            "sky-monarch plan": plan,
            "sky-monarch plan --sky": [*plan, "--sky"],
        }
        costs = _interleaved(peers, {"HOME": home, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"})
    for name, values in costs.items():
        emit(name, "cpu_min", min(values), "s", load="quiet")
    for name in list(peers)[1:]:
        emit(name, "plan_cpu_ratio", min(costs[name]) / min(costs["import sky"]), "ratio", load="quiet")


def measure_reads() -> None:
    """The commands that only look, at a run of four groups on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(Path(folder))
        name = bench.up(bench.job("reads", run=f"{FREE_RANK} --steps 10000000 --step-s 0.05", replicas=4))
        try:
            bench.wait_for_step(name, 200)
            _emit_reads(bench, name, "a run here")
        finally:
            bench.close()


def _emit_reads(bench: Workbench, name: str, load: str) -> None:
    ours = [sys.executable, "-m", "sky_monarch"]
    peers = {
        "status": [*ours, "status", name, "--json"],
        "events": [*ours, "events", name, "--json"],
        "logs": [*ours, "logs", name, "--tail", "100"],
    }
    for what, values in _interleaved(peers, bench.env).items():
        emit("sky-monarch", f"{what}_cpu_p50", statistics.median(values), "s", load=load)
        emit("sky-monarch", f"{what}_cpu_max", max(values), "s", load=load)


def measure_slurm(rounds: int) -> None:
    """Losses of a node, each beside a bare launch on the very node that takes over."""
    from tests.e2e.client import Client
    from tests.e2e.site import site

    with site() as made:
        client = Client(made)
        with _up(client) as name:
            bare, ours, evicted = [], [], []
            for number in range(rounds):
                spare = _spare(made)
                bare.append(_bare_launch(made, spare))
                evicted_s, back_s = _lose(made, client, name, number % 3, spare)
                evicted.append(evicted_s)
                ours.append(back_s)
                load = f"round {number + 1} on {spare}"
                emit("sky launch", "launch_to_first_line", bare[-1], "s", load=load)
                emit("sky-monarch", "node_lost_to_first_commit", back_s, "s", load=load)
                emit("sky-monarch", "node_lost_to_commit_without_it", evicted_s, "s", load=load)
            _emit_reads(client, name, "a run on Slurm")
        ratio = statistics.median(ours) / statistics.median(bare)
        emit("sky-monarch", "node_lost_to_first_commit_ratio", ratio, "ratio", load=f"{rounds} rounds")
        emit("sky-monarch", "node_lost_to_commit_without_it_max", max(evicted), "s", load=f"{rounds} rounds")
        _whole_cluster(made)


def measure_spare(rounds: int, *, torch: bool) -> None:
    """Losses of a node while a spare host is ready, each beside a bare launch on the node of that spare."""
    from tests.e2e.client import Client
    from tests.e2e.site import site

    with site(nodes=5) as made:
        client = Client(made)
        bare = {node: _bare_launch(made, node) for node in made.slurm.nodes}
        recovery = {"standby": 0, "grace_s": 3, "spare": 1}
        fields: dict[str, Any] = {"recovery": recovery, "lighthouse": {"join_timeout_s": 5}}
        job = client.training_job("spared", **fields) if torch else client.free_job("spared", **fields)
        name = client.up(job)
        ratios = []
        try:
            for number in range(rounds):
                client.wait_for_all(name, step=20, within_s=600)
                spare = _ready_spare(client, name)
                node = client.host_jobs(name)[spare].node
                back_s = _lose_to_spare(made, client, name, number % 3, spare)
                ratios.append(back_s / bare[node])
                load = f"round {number + 1} on {node}{', torch' if torch else ''}"
                emit("sky launch", "launch_to_first_line", bare[node], "s", load=load)
                emit("sky-monarch", "node_lost_to_first_commit_on_spare", back_s, "s", load=load)
        finally:
            client.end(name)
        worst = max(ratios)
        emit(
            "sky-monarch",
            "node_lost_to_first_commit_on_spare_ratio_max",
            worst,
            "ratio",
            load=f"{rounds} rounds",
        )


def _ready_spare(client: Client, name: str) -> str:
    """The spare host, once its agent has dialled and it is set up: on a busy machine minutes after the others."""

    def probe() -> str:
        (spare,) = (host for host in client.status(name)["hosts"] if host["spare"])
        dialled = [
            event
            for event in client.events(name)
            if event["event"] == "agent_connected"
            and (event["host"], event.get("attempt")) == (spare["host"], spare["attempt"])
        ]
        assert dialled, spare
        return str(spare["host"])

    return eventually(probe, within_s=600, every_s=0.5, what="a spare host is ready")


def _lose_to_spare(site: Site, client: Client, name: str, replica: int, spare: str) -> float:
    """Switch the node of a group off; seconds to its first commit on the spare."""
    before = client.status(name)["groups"][replica]["generation"]
    lost = client.host_jobs(name)[client.host_of(name, replica)].node
    killed_s = time.monotonic()
    site.slurm.kill_node(lost)
    committed = _first_commit(client, name, replica, before)
    assert client.host_of(name, replica) == spare, "it is not where the bare one was"
    site.slurm.wait_for_node(lost, "down", within_s=90)
    site.slurm.start_node(lost)
    return committed["mono_ns"] / 1e9 - killed_s


def _first_commit(client: Client, name: str, replica: int, before: int) -> dict[str, Any]:
    """The first commit of a group in a later generation than ``before``."""

    def probe() -> dict[str, Any]:
        found = [
            event
            for event in client.events(name)
            if event["event"] == "first_commit"
            and event["replica"] == replica
            and event["generation"] > before
        ]
        assert found
        return found[0]

    return eventually(probe, within_s=400, every_s=0.5, what="the group is back")


@contextlib.contextmanager
def _up(client: Client) -> Iterator[str]:
    name = client.up(client.free_job("loss", step_s=0.05, lighthouse={"join_timeout_s": 5}))
    try:
        client.wait_for_all(name, step=20)
        yield name
    finally:
        client.end(name)


def _spare(site: Site) -> str:
    busy = {job.node for job in site.slurm.jobs()}
    return next(node for node in site.slurm.nodes if node not in busy)


def _marks(place: Path, count: int, since_s: float, *, within_s: float = 400) -> list[float]:
    """When ``count`` tasks began, in seconds since ``since_s`` of this machine's uptime."""

    def probe() -> list[float]:
        found = [float(line) - since_s for line in place.read_text().split()] if place.exists() else []
        assert len(found) >= count, found
        return found

    return eventually(probe, within_s=within_s, every_s=0.1, what=f"{count} tasks begin")


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _bare_launch(site: Site, node: str) -> float:
    """Seconds from `sky.launch` to the first line of its task; SkyPilot is imported before."""
    place = site.slurm.layout.home / "bare-mark"
    place.unlink(missing_ok=True)
    task = site.sky.task(f"cut -d' ' -f1 /proc/uptime >> {place}", node=node)
    launched = site.sky.launch("bare", task)
    (took_s,) = _marks(place, 1, launched.began_s)
    sky = str(Path(sys.executable).parent / "sky")
    for what, argv in {"status": [sky, "status"], "logs": [sky, "logs", "bare", "--no-follow"]}.items():
        began_s = time.monotonic()
        used_s = cpu_s(argv, {**os.environ, **site.sky.env})
        emit("sky", f"{what}_cpu", used_s, "s", load="one bare cluster on Slurm")
        emit("sky", f"{what}_wall", time.monotonic() - began_s, "s", load="one bare cluster on Slurm")
    site.sky.call("down", cluster="bare")
    site.slurm.wait_for_node(node, "idle")
    return took_s


def _lose(site: Site, client: Client, name: str, replica: int, spare: str) -> tuple[float, float]:
    """Switch a group's node off. Seconds to the others' first commit without it, and to its own first commit."""
    before = client.status(name)["groups"][replica]["generation"]
    lost = client.host_jobs(name)[f"{name}-h{replica}"].node
    killed_s = time.monotonic()
    site.slurm.kill_node(lost)

    committed = _first_commit(client, name, replica, before)
    client.wait_for_all(name)
    assert client.host_jobs(name)[f"{name}-h{replica}"].node == spare, "it is not where the bare one was"
    steps = client.steps(name, (replica + 1) % 3)
    without = next(step for step in steps if step.at_s > killed_s and step.participants < 3)
    site.slurm.wait_for_node(lost, "down", within_s=90)
    site.slurm.start_node(lost)
    return without.at_s - killed_s, committed["mono_ns"] / 1e9 - killed_s


def _whole_cluster(site: Site) -> None:
    """One bare cluster of three nodes loses one: all three tasks begin again, as `sky jobs` would let them."""
    place = site.slurm.layout.home / "whole-marks"
    task = site.sky.task(f"cut -d' ' -f1 /proc/uptime >> {place}; sleep 3600", nodes=3)
    launched = site.sky.launch("whole", task)
    _marks(place, 3, launched.began_s)
    node = site.slurm.jobs(named="whole")[0].node
    first = site.slurm.command("scontrol", "show", "hostnames", node).split()[0]
    place.unlink()
    killed_s = _uptime_s()
    site.slurm.kill_node(first)
    while site.sky.call("status").value.get("whole") == "UP":
        time.sleep(LOOK_S)
    seen_s = _uptime_s() - killed_s
    site.sky.launch("whole", task)
    began_s = max(_marks(place, 3, killed_s))
    emit("sky launch, the whole cluster again", "node_lost_to_seen", seen_s, "s", load="three nodes")
    emit("sky launch, the whole cluster again", "node_lost_to_all_begun", began_s, "s", load="three nodes")
    site.sky.call("down", cluster="whole")
