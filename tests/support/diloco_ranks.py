"""Ranks of sessions that take an outer step every few steps, and the same with TorchFT's own DiLoCo."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.torch_ranks import die_in_collective, journal

LOCAL = 5  # steps between two outer ones
SAMPLES, BATCH = 400, 4  # more than all steps of a test use: each at most once
RATE, LOWEST_RATE = 1.0, 1e-3


def rank(log: str, options: dict[str, Any]) -> None:
    """Train on a dataset of which each sample has a parameter of its own, so that an average says what it is of.

    Options: ``steps``; ``total``: of the schedule; ``momentum`` of the inner optimizer; ``die_at``: SIGKILL itself in
    that step; ``die_in_sync``: in the collectives at the end of that step's round; ``fail_sync``: so many of them fail;
    ``hold``: steps before which to wait for a file, as ``{step: path}``; ``retries``.
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
    marks = nn.Parameter(torch.zeros(SAMPLES))
    model.register_parameter("marks", marks)
    weight = model["net"][0].weight
    optimizer = torch.optim.SGD(
        [
            {"params": model["net"].parameters(), "momentum": options.get("momentum", 0.9), "lr": 0.05},
            {"params": [marks], "lr": RATE},
        ],
        lr=RATE,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=options.get("total", options["steps"]), eta_min=LOWEST_RATE
    )
    sampler = Sampler(SAMPLES, BATCH)

    def before_update(step: int) -> None:
        momentum = optimizer.state[weight].get("momentum_buffer")
        write(
            "update",
            step=step,
            lr=optimizer.param_groups[1]["lr"],
            warm=momentum is not None,
            number=sampler.batch_number,
            indices=sampler.indices().tolist(),
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
        retries=options.get("retries", 3),
        timeouts=Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20),
    )
    holds = {int(step): Path(path) for step, path in options.get("hold", {}).items()}
    with session:
        asked = _count_asks(session)
        _tell_outer_steps(session, marks, write)
        if "die_in_sync" in options:
            die_in_collective(session, options["die_in_sync"])
        _fail_collectives(session, options.get("fail_sync", 0))
        while True:
            gate = holds.get(session.step)
            while gate is not None and not gate.exists():
                time.sleep(0.01)
            if not session.running:
                break
            if session.step == options.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            indices = sampler.indices()
            (model["net"](features[indices]).square().mean() + marks[indices].mean()).backward()
            kept = session.step_optimizer()
            write(
                "stepped" if session.step % LOCAL else "synced",
                step=session.step,
                kept=kept,
                digest=session.digest(),
                asked=asked[0],
                participants=session._manager.num_participants(),
                came=session._shares.came,
                samples=session._shares.samples,
                lost=[(one.step, one.replica, one.number) for one in sampler.lost],
            )
        write("finished", step=session.step, digest=session.digest())


def _count_asks(session: Any) -> list[int]:
    asked, ask = [0], session._rounds.ask

    def counted() -> None:
        asked[0] += 1
        ask()

    session._rounds.ask = counted
    return asked


def _tell_outer_steps(session: Any, marks: Any, write: Callable[..., None]) -> None:
    def tell(*_: object) -> None:
        write("outer", step=session._committed_steps, marks=marks.grad.tolist())

    session._outer.optimizer.register_step_pre_hook(tell)


def _fail_collectives(session: Any, count: int) -> None:
    """Let so many collectives at the end of a round fail, as if a member had died."""
    allreduce, left = session._group.allreduce, [count]

    def failing(tensors: Any, options: Any) -> Any:
        if session._taken and left[0]:
            left[0] -= 1
            raise RuntimeError("a member left")
        return allreduce(tensors, options)

    session._group.allreduce = failing


def _plain() -> tuple[Any, Any]:
    import torch
    from torch import nn

    from sky_monarch.training import seed_everything

    torch.set_num_threads(1)
    seed_everything(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _digest(tensors: Iterator[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def ours(log: str, steps: int) -> None:
    """An undisturbed run of a session, told in digests."""
    import torch

    import sky_monarch.training.session
    from sky_monarch.training import Session, Timeouts

    write = journal(log)
    sky_monarch.training.session._LINGER_ALONE_S = 0.1
    model, optimizer = _plain()
    timeouts = Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20)
    session = Session(model, optimizer, target_step=steps, seed=7, bucket_bytes=256, timeouts=timeouts)
    with session:
        session._outer.optimizer.register_step_pre_hook(
            lambda *_: write("outer", digest=_digest(param.grad for param in model.parameters()))
        )
        while session.running:
            model(torch.randn(8, 16, generator=session.generator())).square().mean().backward()
            session.step_optimizer()
            if session.step % LOCAL == 0:
                write("synced", digest=_digest(model.parameters()))


def torchfts(log: str, steps: int) -> None:
    """The same with ``torchft.local_sgd.DiLoCo``."""
    import torch
    from torch import distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    from sky_monarch.training.seeding import batch_generator

    write = journal(log)
    replica = int(os.environ["REPLICA_GROUP_ID"])
    model, optimizer = _plain()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    outer.register_step_pre_hook(
        lambda *_: write("outer", digest=_digest(param.grad for param in model.parameters()))
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"torchft_{replica}",
        hostname="127.0.0.1",
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=LOCAL, pin_memory=False):
        for step in range(steps):
            optimizer.zero_grad()
            generator = batch_generator(7, step=step, replica=replica, rank=0)
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            if (step + 1) % LOCAL == 0:
                write("synced", digest=_digest(model.parameters()))
    manager.shutdown(wait=False)
