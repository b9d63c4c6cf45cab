"""Tensors whose parts lie in the processes of a mesh: dealt out, cut anew, computed with, brought back."""

from __future__ import annotations

import pytest

from sky_monarch.actor import ActorError, ShardedTensor, SupervisionError, shutdown, this_host
from sky_monarch.errors import ConfigError, StaleHandleError
from tests.support.spmd_ranks import Part, iota

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]
LIMIT_S = 90


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def dt(torch):
    from torch.distributed import tensor

    return tensor


@pytest.fixture(scope="module")
def procs():
    yield this_host().spawn_procs({"dp": 2, "tp": 2})
    shutdown()


def test_what_was_dealt_out_comes_back_bit_for_bit_however_it_is_cut(procs, torch, dt):
    whole = torch.randn(7, 10)
    for placements in (
        [dt.Shard(0), dt.Shard(1)],
        [dt.Shard(1), dt.Shard(0)],
        [dt.Shard(0), dt.Shard(0)],
        {"tp": dt.Shard(-1)},
        {},
    ):
        sharded = ShardedTensor.from_full(procs, whole, placements)
        assert torch.equal(sharded.full(), whole), placements
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        other = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
        back = ShardedTensor.from_full(procs, other, {"dp": dt.Shard(1)}).full()
        assert back.dtype == dtype
        assert torch.equal(back, other)
    assert torch.equal(ShardedTensor.from_full(procs, torch.tensor(3.0), {}).full(), torch.tensor(3.0))
    large = torch.randn(1 << 10, 1 << 11)  # 8 MiB: beyond what travels in a message's body
    assert torch.equal(
        ShardedTensor.from_full(procs, large, {"dp": dt.Shard(0), "tp": dt.Shard(1)}).full(), large
    )


def test_each_process_has_the_part_that_the_handle_says(procs, torch, dt):
    whole = torch.arange(24).reshape(4, 6)
    sharded = ShardedTensor.from_full(procs, whole, {"dp": dt.Shard(0), "tp": dt.Shard(1)})

    assert (sharded.shape, sharded.dtype) == ((4, 6), torch.int64)
    assert sharded.placements == (dt.Shard(0), dt.Shard(1))
    seen = procs.spawn("part", Part).look.call(sharded).get(LIMIT_S)
    for point, (values, shape) in seen.items():
        part = whole[2 * point["dp"] : 2 * point["dp"] + 2, 3 * point["tp"] : 3 * point["tp"] + 3]
        assert (values, shape) == (part.flatten().tolist(), (2, 3))
        assert torch.equal(sharded.shard(**point), part)
        assert torch.equal(sharded.shard(point.rank), part)


def test_parts_are_made_where_they_lie_cut_anew_and_computed_with(procs, torch, dt):
    whole = 100 * torch.arange(5).unsqueeze(1) + torch.arange(6).unsqueeze(0)
    made = ShardedTensor.from_function(procs, iota, (5, 6), {"dp": dt.Shard(0)}, dtype=torch.float64)
    assert torch.equal(made.full(), whole.double())

    other = made.reshard([dt.Shard(1), dt.Shard(0)])
    assert other.placements == (dt.Shard(1), dt.Shard(0))
    assert torch.equal(other.full(), whole.double())
    assert torch.equal(made.full(), whole.double()), "the first one is still there"

    weights = ShardedTensor.from_full(procs, torch.ones(6, 3, dtype=torch.float64), {"tp": dt.Shard(1)})
    product = made.apply(torch.matmul, weights)
    assert product.shape == (5, 3)
    assert torch.equal(product.full(), whole.double() @ torch.ones(6, 3, dtype=torch.float64))
    assert torch.equal(made.apply(lambda tensor, by: tensor * by, by=2).full(), whole.double() * 2)

    for op, expected in (("sum", whole.sum()), ("mean", whole.double().mean()), ("max", 405), ("min", 0)):
        assert made.reduce(op).item() == float(expected)
    assert torch.equal(made.reduce("max", dim=0), whole.double().amax(0))
    assert torch.equal(made.reduce("sum", dim=-1, keepdim=True), whole.double().sum(-1, keepdim=True))


def test_a_sum_whose_parts_are_not_added_up_yet_comes_whole(procs, torch, dt):
    left = ShardedTensor.from_full(procs, torch.ones(4, 8), {"tp": dt.Shard(1)})
    right = ShardedTensor.from_full(procs, torch.ones(8, 2), {"tp": dt.Shard(0)})
    product = left.apply(torch.matmul, right)
    assert product.placements[1].is_partial(), "torch adds up as late as possible"
    assert torch.equal(product.full(), torch.full((4, 2), 8.0))
    assert torch.equal(product.shard(3), torch.full((4, 2), 8.0))


def test_what_cannot_be_is_refused(procs, torch, dt):
    whole = torch.zeros(4, 4)
    with pytest.raises(ConfigError, match="3 placements for a mesh of 2 dimensions"):
        ShardedTensor.from_full(procs, whole, [dt.Shard(0)] * 3)
    with pytest.raises(ConfigError, match="the mesh has no dimension 'pp'"):
        ShardedTensor.from_full(procs, whole, {"pp": dt.Shard(0)})
    with pytest.raises(ConfigError, match=r"Shard\(2\) of a tensor of 2 dimensions"):
        ShardedTensor.from_full(procs, whole, {"dp": dt.Shard(2)})
    with pytest.raises(ConfigError, match="Partial is what computing leaves"):
        ShardedTensor.from_full(procs, whole, {"dp": dt.Partial()})
    with pytest.raises(ConfigError, match="not a list"):
        ShardedTensor.from_full(procs, [1, 2], {})
    sharded = ShardedTensor.from_full(procs, whole, {"dp": dt.Shard(0)})
    with pytest.raises(ConfigError, match="the function returned a int, not a DTensor"):
        sharded.apply(lambda tensor: 3)
    with pytest.raises(ConfigError, match=r"the function returned \(1,\) for a part of shape"):
        ShardedTensor.from_function(procs, lambda size, offset: torch.zeros(1), (4, 4), {"dp": dt.Shard(0)})
    with pytest.raises(ActorError, match="raised ZeroDivisionError"):
        sharded.apply(lambda tensor: 1 // 0)
    with pytest.raises(ConfigError, match="'median' is no reduction"):
        sharded.reduce("median")
    with pytest.raises(ConfigError, match="dim is 2"):
        sharded.reduce("sum", dim=2)
    with pytest.raises(ConfigError, match="a rank or a place"):
        sharded.shard()
    sharded.drop()
    sharded.drop()
    with pytest.raises(StaleHandleError, match="does not have that tensor"):
        sharded.full()


def test_a_tensor_is_lost_with_a_process_and_the_next_one_is_made_on_the_new_one(torch, dt, capfd):
    mesh = this_host().spawn_procs({"gpus": 2}, name="pair")
    whole = torch.arange(6.0)
    first = ShardedTensor.from_full(mesh, whole, dt.Shard(0))
    mesh.respawn(1)

    with pytest.raises(StaleHandleError):
        first.full()
    second = ShardedTensor.from_full(mesh, whole, dt.Shard(0))
    assert second.apply(lambda tensor: tensor + 1).reduce("sum").item() == 21.0
    with pytest.raises(StaleHandleError, match="set up anew"):
        first.shard(0)
    mesh.stop().get(LIMIT_S)
    with pytest.raises(SupervisionError):
        second.full()
