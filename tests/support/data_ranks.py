"""Ranks whose gradients say which samples they are of: what the tests of data, scale and schedule run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.support.torch_ranks import die_in_collective, journal

SAMPLES, BATCH = 46, 4  # twelve batches an epoch, the last of two samples


def rank(log: str, options: dict[str, Any]) -> None:
    """Train on a dataset of :data:`SAMPLES`, of which each has a gradient entry of its own.

    Options: ``steps``; ``die_at``: SIGKILL itself in the collectives of that step; ``hold``: steps before
    which to wait for a file, as ``{step: path}``; ``average_first``: with a call of its own; ``fail_heals``:
    so many downloads of the state fail.
    """
    import torch
    from torch import nn

    import sky_monarch.training.session
    from sky_monarch.training import Sampler, Session, Timeouts, seed_everything

    write = journal(log)
    sky_monarch.training.session._LINGER_ALONE_S = 0.1  # all reach the end together
    torch.set_num_threads(1)
    seed_everything(0)
    features = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))})
    # The gradient of a mean over samples is, in this parameter, the share of each sample in that mean.
    model.register_parameter("marks", nn.Parameter(torch.zeros(SAMPLES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options["steps"], eta_min=1e-4)
    sampler = Sampler(SAMPLES, BATCH)

    def before_update(step: int) -> None:
        write(
            "update",
            step=step,
            marks=model.get_parameter("marks").grad.tolist(),
            lr=optimizer.param_groups[0]["lr"],
        )

    session = Session(
        model,
        optimizer,
        target_step=options["steps"],
        sampler=sampler,
        scheduler=scheduler,
        seed=7,
        before_update=before_update,
        bucket_bytes=512,
        timeouts=Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20),
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
            number, indices, share = sampler.batch_number, sampler.indices(), sampler.share
            loss = (
                model["net"](features[indices]).square().mean() + model.get_parameter("marks")[indices].mean()
            )
            loss.backward()
            if options.get("average_first"):
                session.average_gradients()
            if session.step_optimizer():
                write(
                    "commit",
                    step=session.step - 1,
                    digest=session.digest(),
                    took_part=session._manager.is_participating() and share > 0,
                    participants=session._manager.num_participants(),
                    number=number,
                    indices=indices.tolist(),
                    effective_batch=session._contributions.total,
                    lost=[(one.step, one.replica, one.number) for one in sampler.lost],
                )
        write("finished", step=session.step, lost_samples=sampler.lost_samples)


def _fail_heals(manager: Any, count: int) -> None:
    """Lose so many states on their way from the donor."""
    transport, left = manager._checkpoint_transport, [count]
    receive = transport.recv_checkpoint

    def receive_or_fail(**arguments: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError("the donor went away")
        return receive(**arguments)

    transport.recv_checkpoint = receive_or_fail
