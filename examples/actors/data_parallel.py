"""Data-parallel training with torch: each rank of a mesh has its part of the data, gradients are averaged by gloo.

    python examples/actors/data_parallel.py [--ranks 2] [--steps 60]

The script sees every step: it calls one on the whole mesh, and gets a loss from each rank.
"""

import argparse
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sky_monarch.actor import Actor, current_rank, current_size, endpoint, this_host

EXAMPLES = 128


class Trainer(Actor):
    """One rank of the training."""

    @endpoint
    def free_port(self) -> int:
        """Of this rank's host: where its peers may meet."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    @endpoint
    def join(self, port: int) -> int:
        """Meet the peers, and build model and data; returns how many ranks there are."""
        rank, ranks = current_rank().rank, current_size()["gpus"]
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        torch.manual_seed(0)  # the same model everywhere
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        random = torch.Generator().manual_seed(1 + rank)  # other data on each rank
        self.inputs = torch.randn(EXAMPLES, 8, generator=random)
        self.targets = self.inputs[:, :1] * self.inputs[:, 1:2]
        return dist.get_world_size()

    @endpoint
    def step(self) -> float:
        """Take a step on all of this rank's data; returns its loss."""
        loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @endpoint
    def checksum(self) -> float:
        """Of the weights: alike on all ranks."""
        return sum(weight.double().sum().item() for weight in self.model.parameters())

    @endpoint
    def leave(self) -> None:
        """Part from the peers."""
        dist.destroy_process_group()


def train(ranks: int, steps: int) -> tuple[list[float], list[float]]:
    """Train; returns the mean loss of each step, and each rank's sum of all weights at the end."""
    procs = this_host().spawn_procs(per_host={"gpus": ranks})
    trainers = procs.spawn("trainers", Trainer)
    port = trainers.slice(gpus=0).free_port.call_one().get(timeout=120)
    trainers.join.call(port).get(timeout=120)
    losses = []
    for _ in range(steps):
        found = trainers.step.call().get(timeout=60)
        losses.append(sum(found.values()) / len(found))
    checksums = list(trainers.checksum.call().get(timeout=60).values())
    trainers.leave.call().get(timeout=60)
    procs.stop().get(timeout=60)
    return losses, checksums


def main() -> None:
    """Train, and say what the loss was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    losses, checksums = train(options.ranks, options.steps)
    print(
        f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {options.steps} steps on {options.ranks} ranks"
    )
    print("all ranks have the same weights" if len(set(checksums)) == 1 else f"weights differ: {checksums}")


if __name__ == "__main__":
    main()
