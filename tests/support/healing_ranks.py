"""What the forked ranks of the healing tests run. Each writes JSON lines to a file of its own."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from typing import Any

from tests.support.torch_ranks import journal


def rank(log: str, options: dict[str, Any]) -> None:
    """Train a model with buffers that change in the forward pass, differently on each group.

    Options: ``steps``; ``sleep_s`` a step; ``width`` of the model: ``3 * width ** 2`` floats with Adam, for each of
    ``layers``; ``bytes_per_s``: limit of a donor, which also has it heal over TCP; ``batch_bytes``: what is read
    between two looks at whether the others wait; ``wait``: they do; ``move``: the script changes parameters after
    each commit.
    """
    import torch
    from torch import nn

    from sky_monarch.training import Session, Timeouts, membership, seed_everything
    from sky_monarch.training.healing import StripedTransport, arrival

    write = journal(log)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if limit := options.get("bytes_per_s"):
        membership.StripedTransport = functools.partial(StripedTransport, bytes_per_s=limit)  # type: ignore[misc,assignment]
    arrival._BATCH_BYTES = options.get("batch_bytes", arrival._BATCH_BYTES)
    if options.get("wait"):
        StripedTransport.keep_up = lambda self, names: None  # type: ignore[method-assign]
    receive = StripedTransport.recv_checkpoint
    tell = StripedTransport._tell

    def receiving(self: Any, src_rank: int, metadata: str, step: int, timeout: Any) -> Any:
        write("heal", step=step)
        try:
            state = receive(self, src_rank, metadata, step, timeout)
        except Exception as error:
            write("heal_failed", step=step, error=f"{type(error).__name__}: {error}", torn=self.torn)
            raise
        following = self.following
        if following is None:
            write("healed", step=step)
        else:
            write("follows", step=step, here=len(following.here), gave=following.arrival.gave)
        return state

    def telling(self: Any, donors: Any, tally: Any, arrival: Any) -> None:
        told = {"again": tally.again, "kept": tally.kept, "bytes": tally.bytes}
        owners = [dataclasses.asdict(tally.of(one)) for one in donors]
        write("stripes", **told, donors=[one.replica for one in donors], owners=owners)
        tell(self, donors, tally, arrival)

    StripedTransport.recv_checkpoint, StripedTransport._tell = receiving, telling  # type: ignore[method-assign]

    seed_everything(0)
    width = options.get("width", 256)
    model = nn.Sequential(
        nn.Linear(8, width),
        nn.BatchNorm1d(width),
        *(nn.Linear(width, width) for _ in range(options.get("layers", 1))),
        nn.Linear(width, 1),
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
                if options.get("move"):
                    with torch.no_grad():
                        model[-1].weight.mul_(0.99)
        write("finished", step=session.step, digest=session.digest())


def digest_of(state: dict[int, dict[str, Any]]) -> str:
    """SHA-256 of an optimizer's tensors."""
    digest = hashlib.sha256()
    for number in sorted(state):
        for name in sorted(state[number]):
            digest.update(f"{number} {name}".encode() + state[number][name].contiguous().numpy().tobytes())
    return digest.hexdigest()
