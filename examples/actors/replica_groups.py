"""Fault-tolerant training in one script: replica groups are actors, one is killed, the others train on.

    python examples/actors/replica_groups.py [--replicas 3] [--steps 150] [--die-at 10]

Each actor trains in a session of `sky_monarch.training`, as the ranks of a job do. The group that dies is replaced in
its place, takes model and optimizer from one that has gone on, and all end with the same bits.
"""

import argparse
import os
import signal
import time

import torch
from torch import nn

from sky_monarch.actor import Actor, Lighthouse, ReplicaGroups, endpoint, this_host


class Trainer(Actor):
    """One replica group."""

    @endpoint
    def train(self, steps: int, die_at: int) -> tuple[str, int, float, float]:
        """Train; returns a digest of the weights, this process's first step, its first loss and its last one."""
        from sky_monarch.training import Session, seed_everything

        torch.set_num_threads(1)
        seed_everything(0)  # the same model everywhere
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        doomed = os.environ["SKY_MONARCH_REPLICA"] == "1" and os.environ["SKY_MONARCH_GENERATION"] == "1"
        losses, first = [], 0
        with Session(model, optimizer, target_step=steps) as session:
            while session.running:
                if doomed and session.step == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                inputs = torch.randn(128, 8, generator=session.generator())  # other data on each group
                loss = nn.functional.mse_loss(model(inputs), inputs[:, :1] * inputs[:, 1:2])
                loss.backward()
                time.sleep(0.2)  # as if the model were larger
                if session.step_optimizer(metrics={"loss": loss.detach()}):
                    first = first or session.step
                    losses.append(loss.item())
            return session.digest(), first, losses[0], losses[-1]


def main() -> None:
    """Train, and say what the death has cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--die-at", type=int, default=10)
    options = parser.parse_args()
    with this_host().spawn_procs(per_host={"replicas": options.replicas}) as procs:
        trainers = procs.spawn("trainers", Trainer)
        with Lighthouse(min_replicas=options.replicas - 1, expect=options.replicas) as lighthouse:
            groups = ReplicaGroups(trainers, lighthouse)
            ended = list(groups.run(trainers.train, options.steps, options.die_at).values())
    digests = {digest for digest, *_ in ended}
    print(
        f"group 1 was killed before step {options.die_at + 1}; its replacement's first step was {ended[1][1]}"
    )
    print(f"the others took all steps: loss {ended[0][2]:.4f} at first, {ended[0][3]:.4f} at the end")
    print("all groups have the same weights" if len(digests) == 1 else f"weights differ: {digests}")


if __name__ == "__main__":
    main()
