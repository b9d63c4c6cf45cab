"""What the forked ranks of the healing tests run. Each writes JSON lines to a file of its own."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from typing import Any

from tests.support.torch_ranks import journal


def rank(log: str, options: dict[str, Any]) -> None:
    """Train a model with buffers that change in the forward pass, differently on each group.

    Options: ``steps``; ``sleep_s`` a step; ``width`` of the model: ``3 * width ** 2`` floats with Adam;
    ``bytes_per_s``: limit of a donor, which also has it heal over TCP.
    """
    import torch
    from torch import nn

    from sky_monarch.training import Session, Timeouts, membership, seed_everything
    from sky_monarch.training.healing import StripedTransport

    write = journal(log)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if limit := options.get("bytes_per_s"):
        membership.StripedTransport = functools.partial(StripedTransport, bytes_per_s=limit)  # type: ignore[misc,assignment]
    receive = StripedTransport.recv_checkpoint
    tell = StripedTransport._tell

    def receiving(self: Any, src_rank: int, metadata: str, step: int, timeout: Any) -> Any:
        write("heal", step=step)
        try:
            state = receive(self, src_rank, metadata, step, timeout)
        except Exception as error:
            write("heal_failed", step=step, error=f"{type(error).__name__}: {error}", torn=self.torn)
            raise
        write("healed", step=step)
        return state

    def telling(self: Any, donors: Any, transfer: Any, took_s: float) -> None:
        write("stripes", again=transfer.again, donors=[one.replica for one in donors], owners=transfer.owners)
        tell(self, donors, transfer, took_s)

    StripedTransport.recv_checkpoint, StripedTransport._tell = receiving, telling  # type: ignore[method-assign]

    seed_everything(0)
    width = options.get("width", 256)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    timeouts = Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20)
    with Session(model, optimizer, target_step=options["steps"], timeouts=timeouts) as session:
        write("entered")
        while session.running:
            x = torch.randn(8, 8, generator=session.generator())
            time.sleep(options.get("sleep_s", 0.0))
            loss = model(x).square().mean()
            loss.backward()
            if session.step_optimizer():
                write(
                    "commit",
                    step=session.step,
                    digest=session.digest(),
                    moments=digest_of(optimizer.state_dict()["state"]),
                    seen=int(model[1].num_batches_tracked),
                )
        write("finished", step=session.step, digest=session.digest())


def digest_of(state: dict[int, dict[str, Any]]) -> str:
    """SHA-256 of an optimizer's tensors."""
    digest = hashlib.sha256()
    for number in sorted(state):
        for name in sorted(state[number]):
            digest.update(f"{number} {name}".encode() + state[number][name].contiguous().numpy().tobytes())
    return digest.hexdigest()
