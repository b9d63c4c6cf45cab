"""One rank of the peers ``torchft-*``: TorchFT's Manager, one flat allreduce a step.

Not its ``DistributedDataParallel``: under gloo that one ends every survivor (0.2.0), and there would be little to
compare. ``init_sync=False``, as the groups start from equal bits; with it the ranks of one group would differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it: the fork server has it ready
from torch import distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from benches.recovery import model as shared
from benches.recovery.events import RankLog, fail_if_told, log_path
from benches.recovery.gate import Gate
from benches.recovery.tasks import TASKS

_TIMEOUT = timedelta(seconds=60)
_INNER_TIMEOUT = timedelta(seconds=20)


class MarkedGloo(ProcessGroupGloo):  # type: ignore[misc]
    """TorchFT's group, which logs when it enters the rendezvous of a quorum."""

    def __init__(self, log: RankLog, timeout_s: float) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_s))
        self._log = log

    def configure(self, *arguments: Any, **options: Any) -> None:
        """Join the mesh of a quorum."""
        self._log.write("rendezvous")
        super().configure(*arguments, **options)


def main(arguments: Sequence[str]) -> None:
    """Train until killed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store-port", type=int, default=0, help="of the group, where it has several ranks")
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--heartbeat-ms", type=int, required=True)
    parser.add_argument("--collective-timeout-s", type=float, required=True)
    parser.add_argument("--state-gib", type=float, default=0.0)
    parser.add_argument("--ask-first", action="store_true", help="ask for the quorum before computing")
    parser.add_argument("--task", choices=TASKS, default="labels")
    parser.add_argument("--block", type=int, default=0, help="steps from one gate to the next")
    options = parser.parse_args(arguments)

    log = RankLog(log_path(options.folder, options.group, options.rank))
    log.write("main", started=started)
    model, adam = shared.build()
    task = TASKS[options.task]()
    extra = shared.extra_state(options.state_gib)

    if options.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{options.store_port}",
            rank=options.rank,
            world_size=options.ranks,
            timeout=_INNER_TIMEOUT,
        )
        store_port = options.store_port
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store_port = store.port

    def load(state: dict[str, Any]) -> None:
        nonlocal extra
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])
        extra = state["extra"]

    manager = Manager(
        pg=MarkedGloo(log, options.collective_timeout_s),
        min_replica_size=1,
        rank=options.rank,
        world_size=options.ranks,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict(), "extra": extra},
        replica_id=f"rep_{options.group}",
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=options.lighthouse,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=options.heartbeat_ms),
        init_sync=False,
        checkpoint_transport=HTTPTransport(timeout=_TIMEOUT, num_chunks=0),
    )
    optimizer = Optimizer(manager, adam)
    recorder = shared.Recorder(log, model, adam, options.folder / "stop", task.held_out)
    gate = Gate(options.folder, log, options.block)
    while True:
        before = manager.current_step()
        gate.wait(before)
        if options.rank == 0:
            fail_if_told(options.folder, options.group, log)
        inputs, targets = task.batch(before, options.group, options.rank)
        if options.ask_first:
            optimizer.zero_grad()
            shared.compute()
        else:
            shared.compute()
            optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        average_gradients(manager, model, options.ranks)
        optimizer.step()
        recorder.step(before, manager.current_step())


def average_gradients(manager: Manager, model: nn.Module, ranks: int) -> None:
    """Over the group's ranks, then over the groups, in one flat buffer."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if ranks > 1:
        dist.all_reduce(flat)
        flat /= ranks
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main(sys.argv[1:])
