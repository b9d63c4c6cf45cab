"""One program on all ranks of a mesh: environment, process groups, FSDP and tensor parallelism, and groups anew."""

from __future__ import annotations

import os
import signal

import pytest

from sky_monarch.actor import (
    ActorError,
    SupervisionError,
    init_process_group,
    setup_torch_elastic_env,
    this_host,
)
from sky_monarch.errors import ConfigError
from tests.support.actors import Plain
from tests.support.spmd_ranks import die, environment, total, total_by_env, train_sharded
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end", "failures")

LIMIT_S = 90


def test_each_rank_finds_what_torchruns_ranks_find_and_somebody_listens_already():
    procs = this_host().spawn_procs({"hosts": 2, "gpus": 2})

    found = list(procs.spmd(environment, extra="x").get(LIMIT_S).values())

    assert [one["RANK"] for one in found] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "2", "3"]
    assert {one["WORLD_SIZE"] for one in found} == {one["LOCAL_WORLD_SIZE"] for one in found} == {"4"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["TORCHELASTIC_RUN_ID"]) for one in found}) == 1
    assert found[2]["place"] == "{'hosts': 1, 'gpus': 0}"
    assert {one["TORCHELASTIC_RESTART_COUNT"] for one in found} == {"0"}
    again = procs.spmd(environment, extra="y").get(LIMIT_S).get(3)
    assert again == {**found[3], "extra": "y"}, "what is set up stays as it is"

    part = procs.slice(hosts=1)
    assert [one["RANK"] for one in part.spmd(environment, extra="").get(LIMIT_S).values()] == ["0", "1"]
    with pytest.raises(ConfigError, match="spmd runs a function, not 3"):
        procs.spmd(3)
    with pytest.raises(ConfigError, match="this process is no rank of a mesh yet"):
        init_process_group()


def test_a_rank_that_dies_ends_the_call_and_is_a_rank_of_the_next_generation_once_it_is_back(failures):
    procs = this_host().spawn_procs({"gpus": 2})
    before = procs.spmd(environment, extra="").get(LIMIT_S)

    with pytest.raises(SupervisionError, match=r"procs\.spmd\[1\] is dead: .*exited with code 3"):
        procs.spmd(die, 1, 3).get(LIMIT_S)
    with pytest.raises(SupervisionError):
        procs.spmd(environment, extra="").get(LIMIT_S)
    procs.respawn(1)

    after = procs.spmd(environment, extra="").get(LIMIT_S)
    assert [one["RANK"] for one in after.values()] == ["0", "1"]
    assert {one["TORCHELASTIC_RESTART_COUNT"] for one in after.values()} == {"1"}
    assert after.get(0)["MASTER_PORT"] != before.get(0)["MASTER_PORT"], "nothing of the dead is met there"
    assert after.get(0)["TORCHELASTIC_RUN_ID"] == after.get(1)["TORCHELASTIC_RUN_ID"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_process_group_is_formed_again_after_a_rank_was_replaced(failures):
    actors = this_host().spawn_procs({"gpus": 3}).spawn("plain", Plain)
    assert set(actors.spmd(total, 1.0).get(LIMIT_S).values()) == {6.0}
    assert set(actors.spmd(total, 2.0).get(LIMIT_S).values()) == {9.0}, "the group is still there"

    # Rank 0 has the store of the first generation.
    for victim in (1, 0):
        os.kill(actors.pid.call().get(LIMIT_S).get(victim), signal.SIGKILL)
        eventually(lambda: failures, what="the death is heard of")
        failures.clear()
        actors.respawn(victim)
        assert set(actors.spmd(total, 3.0).get(LIMIT_S).values()) == {12.0}
    setup_torch_elastic_env(actors)
    assert set(actors.spmd(total, 0.0).get(LIMIT_S).values()) == {3.0}, "on request, too"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_script_of_torchruns_meets_by_its_environment_alone():
    procs = this_host().spawn_procs({"gpus": 2})
    assert set(procs.spmd(total_by_env, 2.0).get(LIMIT_S).values()) == {4.0}
    with pytest.raises(ActorError, match="ValueError"):
        procs.spmd(int, "no number").get(LIMIT_S)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_fsdp_and_tensor_parallelism_on_the_dimensions_of_a_mesh_compute_what_one_process_does():
    procs = this_host().spawn_procs({"dp": 2, "tp": 2})
    (alone, whole), *_ = procs.slice(dp=0, tp=0).spmd(train_sharded, "alone", 8).get(LIMIT_S).values()
    for kind, share in (("tp", 0.55), ("fsdp", 0.6), ("both", 0.35)):
        for losses, numbers in procs.spmd(train_sharded, kind, 8).get(LIMIT_S).values():
            assert losses == pytest.approx(alone, rel=1e-4), kind
            assert numbers <= share * whole, kind
