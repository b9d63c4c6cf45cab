"""Communicators from Python: on software doubles, between real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from sky_monarch.errors import DeviceError
from tests.support.hip_double import with_ccl_double
from tests.support.runs import Workbench

RANKS = f"{sys.executable} -m tests.support.comm_ranks"
LIMIT_S = 100


def run_ranks(scenario: str, ranks: int, **settings: str) -> list[tuple[int, str, str]]:
    """Each rank's exit code, output and errors."""
    env: dict[str, Any] = with_ccl_double(**settings)
    started = [
        subprocess.Popen(
            [*RANKS.split(), scenario, str(rank), str(ranks)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    assert started[0].stdout is not None
    unique_id = started[0].stdout.readline()
    for child in started[1:]:
        assert child.stdin is not None
        child.stdin.write(unique_id)
        child.stdin.flush()
    ended = [child.communicate(timeout=LIMIT_S) for child in started]
    return [(child.returncode, *said) for child, said in zip(started, ended, strict=True)]


def all_done(ended: list[tuple[int, str, str]]) -> None:
    for code, out, said in ended:
        assert code == 0, said
        assert out.endswith("done\n"), said
        assert "SIMULATED" in said


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_ranks_reduce_gather_scatter_and_send_under_either_vendors_names(platform):
    all_done(run_ranks("reduces", 2, SKY_MONARCH_GPU_PLATFORM=platform))


def test_tensors_of_a_device_are_taken_and_others_are_refused_by_name():
    all_done(run_ranks("takes_tensors", 1))


def test_the_death_of_a_rank_is_an_error_that_says_what_to_do():
    survivor, victim = run_ranks("loses_a_peer", 2)
    all_done([survivor])
    assert victim[0] == -signal.SIGKILL


def test_a_start_without_the_others_ends_with_an_error_of_its_own():
    all_done(run_ranks("is_alone", 1))


def test_a_host_without_accelerators_has_none_and_says_so():
    code = (
        "from sky_monarch.actor import Communicator\nfrom sky_monarch.errors import DeviceError\n"
        "try:\n    Communicator.new_id()\nexcept DeviceError as error:\n    print(error)\n"
    )
    env = {**with_ccl_double(), "SKY_MONARCH_GPU_PLATFORM": "host"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "this host has no accelerators" in done.stdout
    assert issubclass(DeviceError, Exception)


def test_actors_of_a_mesh_get_a_communicator_among_themselves_and_lose_it_together():
    program = """
from sky_monarch.actor import Communicator, shutdown, this_host
from tests.support.comm_ranks import Summing

mesh = this_host().spawn_procs({"gpus": 2}).spawn("summing", Summing)
Communicator.connect(mesh, timeout_s=30)
print(sorted(mesh.total.call(2.5).get(30).values()))
mesh.slice(gpus=1).add_and_die.broadcast()
print(mesh.slice(gpus=0).failed.call_one().get(30))
shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=with_ccl_double(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    totals, lost = done.stdout.splitlines()[:2]
    assert totals == "[5.0, 5.0]"
    assert "the communicator is lost" in lost


def test_a_rank_whose_device_is_not_given_back_ends_itself_and_its_agent_starts_another(workbench: Workbench):
    env = with_ccl_double()
    told = {name: env[name] for name in env if name.startswith("SKY_MONARCH_")}
    exports = " ".join(f"{name}={value}" for name, value in told.items())
    name = workbench.up(workbench.job("wedged", run=f"env {exports} {RANKS} replaced", replicas=1))
    ended = workbench.wait_for_end(name)
    assert ended["state"] == "SUCCEEDED", ended["reason"]
    death, _ = (event for event in workbench.events(name) if event["event"] == "rank_exited")
    assert death["exit"] == {"code": 75}
    assert "only the end of this process gives its device back" in death["tail"][-1], death["tail"]
