"""Fully sharded training with torch's FSDP2: each rank of a mesh keeps a part of every weight, and of Adam's state.

    python examples/actors/fsdp.py [--ranks 2] [--steps 40]

`mesh.spmd(train)` runs one function on all ranks, as torchrun runs a script; `device_mesh()` is the mesh with its own
dimensions. The script then brings the weights together, and evaluates the model in its own process.
"""

import argparse

import torch
import torch.distributed.checkpoint.state_dict as state
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sky_monarch.actor import device_mesh, this_host

HIDDEN = 64


def model_and_data() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model, inputs of shape ``(256, 8)`` and targets of shape ``(256, 1)``: the same wherever this is called."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    inputs = torch.randn(256, 8)
    return model, inputs, inputs[:, :1] * inputs[:, 1:2]


def train(steps: int) -> tuple[float, float, int, dict[str, torch.Tensor]]:
    """What each rank does; returns its first and last loss, how many numbers it has, and from rank 0 the weights."""
    model, inputs, targets = model_and_data()
    mesh = device_mesh("cpu")
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs[rank::ranks]), targets[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    numbers = sum(weight.to_local().numel() for weight in model.parameters() if isinstance(weight, DTensor))
    options = state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state.get_model_state_dict(model, options=options)  # all ranks take part, rank 0 gets them
    return losses[0], losses[-1], numbers, weights


def main() -> None:
    """Train, and see whether the weights that came back are those that were trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with this_host().spawn_procs(per_host={"dp": options.ranks}) as procs:
        ended = procs.spmd(train, options.steps).get(timeout=200)
    first, last, _, weights = ended.get(0)
    model, inputs, targets = model_and_data()
    whole = sum(weight.numel() for weight in model.parameters())
    model.load_state_dict(weights)
    here = nn.functional.mse_loss(model(inputs), targets).item()
    print(f"{options.ranks} ranks with {[numbers for *_, numbers, _ in ended.values()]} of {whole} numbers")
    print(f"loss {first:.4f} at first, {last:.4f} after {options.steps} steps; {here:.4f} in this process")


if __name__ == "__main__":
    main()
