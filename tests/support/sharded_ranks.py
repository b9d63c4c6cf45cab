"""Ranks whose model is sharded over their group by ``fully_shard``, and one process that has all of it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.data_ranks import BATCH, SAMPLES, _fail_heals
from tests.support.torch_ranks import die_in_collective, journal

SEED, RATE, MOST_NORM = 7, 1e-2, 0.2


class Marked(nn.Module):
    """A loss whose gradients say which samples it is a mean over, and how the mean is weighed."""

    def __init__(self) -> None:
        super().__init__()
        # Three rows for two ranks, and one.
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
        self.ones = nn.Parameter(torch.zeros(1, 2))
        # A gradient is here the share of each sample in the mean: sharded, and left whole.
        self.marks = nn.Parameter(torch.zeros(SAMPLES))
        self.plain = nn.Parameter(torch.zeros(SAMPLES))
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        own = self.marks[indices].mean() + self.plain[indices].mean() + self.ones.sum()
        return self.net(features).square().mean() + own


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))


def dealt_out(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name != "plain"]


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    from torch.distributed.tensor import DTensor

    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def final_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: [held(one).tolist() for one in (param, *optimizer.state[param].values())]
        for name, param in model.named_parameters()
    }


def optimizer_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for param in model.parameters():
        for name, value in sorted(optimizer.state[param].items()):
            digest.update(f"{name} {held(value).tolist()}".encode())
    return digest.hexdigest()


def rank(log: str, options: dict[str, Any]) -> None:
    """Train until the end, or until killed.

    Options: ``steps``; ``die_at``: SIGKILL itself in the collectives of that step; ``hold``: steps before which
    to wait for a file, as ``{step: path}``; ``average_first``; ``fail_heals``: so many downloads fail.
    """
    from torch.distributed.fsdp import fully_shard

    import sky_monarch.training.session
    from sky_monarch.training import Sampler, Session, Timeouts, inner_mesh, seed_everything

    write = journal(log)
    sky_monarch.training.session._LINGER_ALONE_S = 0.1
    torch.set_num_threads(1)
    timeouts = Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20)
    mesh = inner_mesh(timeouts=timeouts)
    seed_everything(0)
    features, model = data(), Marked()
    fully_shard(model.net, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.plain})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    sampler = Sampler(SAMPLES, BATCH)

    def before_update(step: int) -> None:
        gradients = {
            name: held(model.get_parameter(name).grad).tolist() for name in ("marks", "plain", "ones")
        }
        write("update", step=step, **gradients)
        nn.utils.clip_grad_norm_(dealt_out(model), MOST_NORM)

    session = Session(
        model,
        optimizer,
        target_step=options["steps"],
        sampler=sampler,
        seed=SEED,
        before_update=before_update,
        bucket_bytes=512,
        timeouts=timeouts,
    )
    holds = {int(step): Path(path) for step, path in options.get("hold", {}).items()}
    with session:
        if "die_at" in options:
            die_in_collective(session, options["die_at"])
        _fail_heals(session._manager, options.get("fail_heals", 0))
        while True:
            gate = holds.get(session.step)
            while gate is not None and not gate.exists():
                time.sleep(0.01)
            if not session.running:
                break
            indices, share = sampler.indices(), sampler.share
            session.weigh(model(features[indices], indices)).backward()
            if options.get("average_first") and not session.average_gradients():
                continue
            if session.step_optimizer():
                with torch.no_grad():
                    model(features[:2], torch.arange(2))  # an evaluation: FSDP leaves some parameters whole
                write(
                    "commit",
                    step=session.step - 1,
                    digest=session.digest(),
                    optimizer=optimizer_digest(model, optimizer),
                    took_part=session._manager.is_participating() and share > 0,
                    participants=session._manager.num_participants(),
                    indices=indices.tolist(),
                )
        session.digest()
        write("finished", step=session.step, state=final_state(model, optimizer))


def reference(log: str, samples: list[list[int]]) -> None:
    """The same training by one process, without a session and without FSDP: each step on all of its samples."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features, model = data(), Marked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for of_step in samples:
        indices = torch.tensor(of_step)
        optimizer.zero_grad()
        model(features[indices], indices).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        nn.utils.clip_grad_norm_(dealt_out(model), MOST_NORM)
        optimizer.step()
    journal(log)("finished", step=len(samples), state=final_state(model, optimizer))
