"""The script of a job whose hosts reach nobody but the head: DiLoCo with a session, and a death in the middle of it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

from sky_monarch.training import Session, seed_everything
from tests.support.torch_ranks import die_in_collective, journal

BALLAST = 1 << 20  # parameters that nobody needs: what goes through the tunnel is to be seen in its counts


def main() -> None:
    """Train until a file says which step is the last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dies", type=int, required=True, help="the replica that does, once")
    parser.add_argument("--in-collective", type=int, required=True, help="in which of its collectives")
    options = parser.parse_args()
    stop = options.folder / "stop"

    torch.set_num_threads(1)
    seed_everything(0)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))})
    ballast = nn.Parameter(torch.zeros(BALLAST))
    model.register_parameter("ballast", ballast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = Session(model, optimizer, seed=7)
    generation = int(os.environ["SKY_MONARCH_GENERATION"])
    write = journal(str(options.folder / f"rank{session.replica}.g{generation}.jsonl"))
    write("main", pid=os.getpid())
    with session:
        if session.replica == options.dies and generation == 1:
            die_in_collective(session, options.in_collective)
        while session.running:
            inputs = torch.randn(8, 16, generator=session.generator())
            loss = model["net"](inputs).square().mean() + (ballast[:8] - session.replica).square().mean()
            loss.backward()
            before = session.step
            kept = session.step_optimizer(metrics={"loss": loss.detach()})
            if kept and session._taken == 0:
                write("synced", step=session.step, digest=session.digest(), members=session._group.members)
                if stop.exists() and session.step >= int(stop.read_text()):
                    break
            time.sleep(0.02 if session.step > before else 0.0)
    write("finished")


if __name__ == "__main__":
    main()
