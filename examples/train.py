"""The training session in one page: a script whose replica groups may die and return at any step.

sky-monarch up job.yaml     with `run: python examples/train.py`, `preload: [sky_monarch.training.session]`
python examples/train.py    the same, alone
"""

import argparse
import time

import torch
from torch import nn

from sky_monarch.training import Session, seed_everything

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--step-s", type=float, default=0.0, help="time that a step takes at least")
arguments = parser.parse_args()

torch.set_num_threads(1)
seed_everything(0)  # before the model is built: all groups start from the same bits
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def before_update(step: int) -> None:
    """Schedule and clipping: the averaged gradients are in place, the optimizer comes next."""
    optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 20)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


with Session(model, optimizer, target_step=arguments.steps, seed=0, before_update=before_update) as session:
    while session.running:
        # Drawn from (seed, step, replica, rank): a step that is done again sees the same data.
        inputs = torch.randn(32, 16, generator=session.generator())
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        session.step_optimizer(metrics={"loss": loss.detach(), "lr": optimizer.param_groups[0]["lr"]})
        time.sleep(arguments.step_s)
    print(f"replica {session.replica} step {session.step} digest {session.digest()}", flush=True)
