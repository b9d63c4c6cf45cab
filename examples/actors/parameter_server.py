"""A parameter server: workers pull the weights, push gradients, and never wait for each other.

    python examples/actors/parameter_server.py [--workers 3] [--steps 200]

Each worker has its own part of the data of a linear regression. They are given the server as an argument, and call
it themselves.
"""

import argparse
from typing import Any

import numpy as np

from sky_monarch.actor import Actor, current_rank, endpoint, this_host

FEATURES = 16
EXAMPLES = 256
LEARNING_RATE = 0.05


def truth() -> np.ndarray:
    """The weights that are to be found, shape ``(FEATURES,)``."""
    return np.linspace(-1, 1, FEATURES)


class Server(Actor):
    """Keeps the weights."""

    def __init__(self) -> None:
        self.weights = np.zeros(FEATURES)
        self.pushes = 0

    @endpoint
    def pull(self) -> np.ndarray:
        """The weights as they are now, shape ``(FEATURES,)``."""
        return self.weights

    @endpoint
    def push(self, gradient: np.ndarray) -> None:
        """Take a step along a gradient of shape ``(FEATURES,)``, from weights that may have moved since."""
        self.weights = self.weights - LEARNING_RATE * gradient
        self.pushes += 1

    @endpoint
    def pushed(self) -> int:
        """How many gradients have come."""
        return self.pushes


class Worker(Actor):
    """Has a part of the data.

    Args:
        server: The mesh of the server, of one rank.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        random = np.random.default_rng(current_rank().rank)
        self.inputs = random.normal(size=(EXAMPLES, FEATURES))
        self.targets = self.inputs @ truth() + random.normal(scale=0.01, size=EXAMPLES)

    @endpoint
    async def train(self, steps: int) -> float:
        """Push so many gradients; returns the loss of the last weights pulled."""
        loss = 0.0
        for _ in range(steps):
            weights = await self.server.pull.call_one()
            errors = self.inputs @ weights - self.targets
            loss = float(np.mean(errors**2))
            await self.server.push.call_one(self.inputs.T @ errors / EXAMPLES)
        return loss


def train(workers: int, steps: int) -> tuple[np.ndarray, int, list[float]]:
    """Train; returns the weights, how many gradients made them, and each worker's last loss."""
    host = this_host()
    server_proc = host.spawn_procs(per_host={"servers": 1})
    server = server_proc.spawn("server", Server).slice(servers=0)
    procs = host.spawn_procs(per_host={"workers": workers})
    losses = procs.spawn("workers", Worker, server).train.call(steps).get(timeout=120)
    weights, pushed = server.pull.call_one().get(timeout=30), server.pushed.call_one().get(timeout=30)
    procs.stop().get(timeout=30)
    server_proc.stop().get(timeout=30)
    return weights, pushed, [loss for _, loss in losses.items()]


def main() -> None:
    """Train, and say how near the weights are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    weights, pushed, losses = train(options.workers, options.steps)
    print(
        f"{pushed} gradients of {options.workers} workers, losses {', '.join(f'{loss:.5f}' for loss in losses)}"
    )
    print(f"largest error of a weight: {np.abs(weights - truth()).max():.4f}")


if __name__ == "__main__":
    main()
