"""Tensor-parallel training with torch: each rank of a mesh has a part of every weight.

    python examples/actors/tensor_parallel.py [--ranks 2] [--steps 40]

The two layers are split by `torch.distributed.tensor.parallel`, which computes in the ranks together what one process
would compute alone; the script checks that against a model of its own.
"""

import argparse
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sky_monarch.actor import Actor, current_rank, current_size, endpoint, this_host

HIDDEN = 64
LEARNING_RATE = 0.05


def model_and_data() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model, inputs of shape ``(128, 8)`` and targets of shape ``(128, 1)``: the same wherever this is called."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    inputs = torch.randn(128, 8)
    return model, inputs, inputs[:, :1] * inputs[:, 1:2]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Take a step; returns the loss."""
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Trainer(Actor):
    """One rank of the training."""

    @endpoint
    def free_port(self) -> int:
        """Of this rank's host: where its peers may meet."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    @endpoint
    def join(self, port: int) -> int:
        """Meet the peers, and take a part of each weight; returns how many numbers this rank has."""
        rank, ranks = current_rank().rank, current_size()["tp"]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        model, self.inputs, self.targets = model_and_data()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        self.model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        return sum(weight.to_local().numel() for weight in self.model.parameters())

    @endpoint
    def step(self) -> float:
        """Take a step; returns the loss."""
        return step(self.model, self.optimizer, self.inputs, self.targets)

    @endpoint
    def leave(self) -> None:
        """Part from the peers."""
        dist.destroy_process_group()


def train(ranks: int, steps: int) -> tuple[list[float], list[int]]:
    """Train; returns the loss of each step, and how many numbers each rank had."""
    procs = this_host().spawn_procs(per_host={"tp": ranks})
    trainers = procs.spawn("trainers", Trainer)
    port = trainers.slice(tp=0).free_port.call_one().get(timeout=120)
    numbers = trainers.join.call(port).get(timeout=120)
    losses = [trainers.step.call().get(timeout=60).get(0) for _ in range(steps)]
    trainers.leave.call().get(timeout=60)
    procs.stop().get(timeout=60)
    return losses, list(numbers.values())


def alone(steps: int) -> list[float]:
    """The losses of the same training in this process."""
    model, inputs, targets = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return [step(model, optimizer, inputs, targets) for _ in range(steps)]


def main() -> None:
    """Train, and say how near it came to a training in one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    losses, numbers = train(options.ranks, options.steps)
    whole = sum(weight.numel() for weight in model_and_data()[0].parameters())
    print(f"{options.ranks} ranks with {numbers} of {whole} numbers")
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {options.steps} steps")
    apart = max(abs(ours - theirs) for ours, theirs in zip(losses, alone(options.steps), strict=True))
    print(f"at most {apart:.1e} from the losses of one process")


if __name__ == "__main__":
    main()
