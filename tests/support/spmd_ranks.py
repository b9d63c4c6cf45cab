"""What the ranks of a mesh do together in tests."""

from __future__ import annotations

import os
import socket
from typing import Any

from sky_monarch.actor import Actor, ShardedTensor, current_rank, device_mesh, endpoint, init_process_group

ELASTIC = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def environment(extra: str) -> dict[str, str]:
    """What torch's launcher would have told this rank, and whether somebody listens there already."""
    found = {name: os.environ[name] for name in ELASTIC}
    with socket.create_connection((found["MASTER_ADDR"], int(found["MASTER_PORT"])), timeout=5):
        return {**found, "extra": extra, "place": repr(dict(current_rank()))}


def die(rank: int, code: int) -> int:
    if current_rank().rank == rank:
        os._exit(code)
    return rank


def total(value: float) -> float:
    """A sum over all ranks."""
    import torch
    import torch.distributed as dist

    init_process_group(timeout_s=60)
    one = torch.tensor([value + current_rank().rank])
    dist.all_reduce(one)
    return one.item()


def total_by_env(value: float) -> float:
    """The same, by what torch itself makes of the environment, as a script of torchrun's does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    one = torch.tensor([value])
    dist.all_reduce(one)
    dist.destroy_process_group()
    return one.item()


def train_sharded(kind: str, steps: int) -> tuple[list[float], int]:
    """Losses, and how many numbers this rank has, of a model that is dealt out over the ranks, or not: ``alone``."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(32, 8)
    targets = inputs[:, :1] * inputs[:, 1:2]
    if kind != "alone":
        mesh = device_mesh("cpu")
        if kind in ("tp", "both"):
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind in ("fsdp", "both"):
            fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return losses, sum(one.numel() for one in local)


class Part(Actor):
    """Looks at the part of a tensor that its process has."""

    @endpoint
    def look(self, tensor: ShardedTensor) -> tuple[list[Any], tuple[int, ...]]:
        local = tensor.dtensor().to_local()
        return local.flatten().tolist(), tuple(local.shape)


def iota(size: tuple[int, ...], offset: tuple[int, ...]) -> Any:
    """Each element of a matrix with 100 columns at most, as ``100 * row + column``."""
    import torch

    rows = torch.arange(offset[0], offset[0] + size[0]).unsqueeze(1)
    columns = torch.arange(offset[1], offset[1] + size[1]).unsqueeze(0)
    return 100 * rows + columns
