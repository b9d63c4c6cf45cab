"""Actors that train in a fault-tolerant session."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

from sky_monarch.actor import Actor, endpoint


class Trainer(Actor):
    """One rank of a replica group."""

    @endpoint
    def train(
        self, steps: int, folder: str, die: tuple[int, int] | None = None, raises: bool = False
    ) -> dict[str, Any]:
        """Train to the last step; returns what it has ended with.

        Args:
            steps: To commit.
            folder: Where a group that comes back leaves word of it: until then the others take their time.
            die: ``(replica, step)`` at which the first generation kills itself.
            raises: It raises there instead.
        """
        import torch
        from torch import nn

        from sky_monarch.training import Session, Timeouts, inner_mesh, seed_everything

        torch.set_num_threads(1)
        seed_everything(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        if os.environ["WORLD_SIZE"] != "1":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=inner_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generation, back = int(os.environ["SKY_MONARCH_GENERATION"]), Path(folder) / "back"
        commits: list[tuple[int, int, float]] = []
        timeouts = Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20)
        with Session(model, optimizer, target_step=steps, timeouts=timeouts) as session:
            while session.running:
                step = session.step
                if die == (session.replica, step) and generation == 1:
                    if raises:
                        raise ValueError("this batch cannot be")
                    os.kill(os.getpid(), signal.SIGKILL)
                if die is not None and step > die[1] + 5 and not back.exists():
                    time.sleep(0.3)
                loss = model(torch.randn(8, 16, generator=session.generator())).square().mean()
                loss.backward()
                if session.step_optimizer(metrics={"loss": loss.detach()}):
                    participants = session._manager.num_participants()
                    commits.append((session.step, participants, time.monotonic()))
                    if generation > 1:
                        back.touch()
            return {
                "generation": generation,
                "replica": session.replica,
                "step": session.step,
                "digest": session.digest(),
                "first": commits[0][0],
                "sizes": [size for _, size, _ in commits],
                "gap_s": max(b - a for (_, _, a), (_, _, b) in itertools.pairwise(commits)),
            }
