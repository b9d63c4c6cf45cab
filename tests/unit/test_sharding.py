"""What a session takes of a sharded model, and what it refuses. One process: its peers are torch's fake ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sky_monarch import standby
from sky_monarch.errors import ConfigError
from sky_monarch.training import GradientBuckets, Sampler, inner_mesh
from sky_monarch.training.contributions import Contributions
from sky_monarch.training.digest import parameters_digest
from sky_monarch.training.environment import RankEnvironment
from sky_monarch.training.membership import join_group
from sky_monarch.training.sharding import Sharding
from sky_monarch.training.timeouts import Timeouts

pytestmark = pytest.mark.torch

GROUP = RankEnvironment(rank=0, world_size=2, store=("127.0.0.1", 1))
CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """Makes the first of so many ranks of this process, until the end of the test."""
    yield lambda size: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    if dist.is_initialized():
        dist.destroy_process_group()


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)), mesh=mesh)


def whole_model() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_model_on_a_mesh_that_is_not_the_group_is_refused(world: Callable[[int], None]) -> None:
    world(4)
    hybrid = model_on(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ConfigError, match=r"mesh of 2 dimensions \(HSDP"):
        Sharding(hybrid, world_size=4)
    every = model_on(init_device_mesh("cpu", (4,)))
    with pytest.raises(ConfigError, match=r"the ranks \[0, 1, 2, 3\], but this replica group has 2"):
        Sharding(every, world_size=2)
    two = init_device_mesh("cpu", (4,), mesh_dim_names=("a",)), init_device_mesh("cpu", (4,))
    with pytest.raises(ConfigError, match="another mesh"):
        Sharding(nn.Sequential(*map(model_on, two)), world_size=4)
    copies = whole_model()
    copies.weight = nn.Parameter(distribute_tensor(copies.weight.detach(), two[1], [Replicate()]))
    with pytest.raises(ConfigError, match="only shards are averaged"):
        Sharding(copies, world_size=4)
    with pytest.raises(ConfigError, match="FSDP1"):
        Sharding(FullyShardedDataParallel(whole_model(), device_id=CPU), world_size=4)
    with pytest.raises(ConfigError, match="default process group has 4 ranks, but this replica group 2"):
        join_group(GROUP, Timeouts())
    assert Sharding(every, world_size=4).mesh == every[0].weight.device_mesh
    assert Sharding(whole_model(), world_size=2).mesh is None


def test_a_state_travels_as_shards_and_arrives_on_the_mesh_of_whom_it_heals(
    world: Callable[[int], None],
) -> None:
    world(2)
    model, other = model_on(init_device_mesh("cpu", (2,))), model_on(init_device_mesh("cpu", (2,)))
    donor, joiner = Sharding(model, world_size=2), Sharding(other, world_size=2)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    _, save = donor.carried("model", model.load_state_dict, model.state_dict)
    load, _ = joiner.carried("model", other.load_state_dict, other.state_dict)
    donor.note()
    model(torch.ones(1, 4))  # the root's parameters are whole now
    whole = [id(param) for param in model.parameters()]
    state = save()
    assert [id(param) for param in model.parameters()] == whole, "nobody has resharded them under the step"
    assert not any(isinstance(leaf, DTensor) for piece in state.values() for leaf in piece)
    load(state)
    assert parameters_digest(other) == parameters_digest(model)


def test_a_parameter_of_which_this_rank_holds_nothing_costs_no_collective(
    world: Callable[[int], None],
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    small = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (2,)))
    buckets = GradientBuckets(small.parameters())
    buckets.pack()
    assert buckets.buckets == []
    buckets.unpack()
    assert small.weight.grad.shape == (1, 3)


def test_a_loss_is_weighed_by_its_samples_and_weighs_once() -> None:
    counts = Contributions(GROUP, CPU, None, seed=0, sharded=True)
    counts.begin()
    assert float(counts.weigh(torch.tensor(2.0), 3)) == 6.0
    assert float(counts.weigh(torch.tensor(1.0), 1)) == 1.0
    assert counts.offer(None) == 1.0, "in the loss already"
    assert counts._counts.tolist() == [4]
    counts.begin()
    counts.weigh(torch.tensor(1.0), 0)
    assert counts.offer(None) == 1.0, "FSDP has put the other ranks' gradients into these shards"
    with pytest.raises(ConfigError, match="given to weigh"):
        counts.offer(4)
    counts.begin()
    assert counts.offer(4) == 4.0
    with pytest.raises(ConfigError, match="were not given"):
        counts.weigh(torch.tensor(1.0), None)


def test_what_weighs_differently_in_a_group_that_shards_its_model_is_refused() -> None:
    counts = Contributions(GROUP, CPU, None, seed=0, sharded=True)
    counts.offer(3)
    counts._counts += 2  # as the sum with the other rank's
    with pytest.raises(ConfigError, match="this rank has 3 samples, its group of 2 5") as refused:
        counts.require_even()
    assert "session.weigh" in str(refused.value.hint)
    counts._counts += 1
    counts.require_even()
    for sampler in (Sampler(10, 4), Sampler(10, 4, drop_last=True), Sampler(12, 4)):
        counts = Contributions(GROUP, CPU, sampler, seed=0, sharded=True)
        if sampler.drop_last or sampler.dataset_len % 4 == 0:
            assert counts.offer(None) == 1.0
        else:
            with pytest.raises(ConfigError, match="short, of one rank"):
                counts.offer(None)
            counts.weigh(torch.tensor(1.0), None)
            assert counts.offer(None) == 1.0


def test_a_standby_waits_for_its_group_until_it_is_needed(
    world: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)
    agent = {"SKY_MONARCH_AGENT": "unix:/none", "SKY_MONARCH_TOKEN": "x", "SKY_MONARCH_RUN_ID": "run"}
    for name, text in {**agent, "SKY_MONARCH_GENERATION": "0"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="belongs to no generation"):
        inner_mesh("cpu")
    assert not dist.is_initialized()
    reader, writer = os.pipe()
    os.write(writer, json.dumps({"env": {"SKY_MONARCH_GENERATION": "2"}}).encode() + b"\n")
    os.close(writer)
    standby.hold(standby.Promotion(reader))
    try:
        mesh = inner_mesh("cpu")
    finally:
        standby.release()
    assert not standby.is_held()
    assert (mesh.ndim, mesh.size(), mesh.mesh_dim_names) == (1, 1, ("shard",))
    assert inner_mesh("cpu") == mesh, "it may be asked for again"
