"""What torch, TorchFT and the core do at their first use, done while nobody waits for it."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module

import torch
from torch import distributed as dist

from sky_monarch.training.healing import Replicated, Source, StripedTransport
from sky_monarch.training.process_group import ResilientGloo

__all__ = ["warm_up"]

logger = logging.getLogger(__name__)

_LIMIT = timedelta(seconds=10)


def warm_up(address: str) -> None:
    """Use once, on nothing: the optimizer's kernels, a collective, a heal, and the channel to the agent.

    The first step of a rank costs 10 ms less after it, 40 ms where the processors are busy (measured). No
    generator is used, nothing of the user's is touched, and nobody but this process is spoken to.

    Args:
        address: Numeric address that the session listens on.
    """
    try:
        _use_everything(address)
    except Exception as error:  # noqa: BLE001  # only speed is lost; what is broken will say so again
        logger.warning("a standby could not warm up: %s: %s", type(error).__name__, error)


def _use_everything(address: str) -> None:
    import_module("sky_monarch.actors.agent_client")
    import_module("sky_monarch._core")
    with torch.enable_grad():
        nothing = torch.nn.Parameter(torch.zeros(2, device="cpu", dtype=torch.float32))
        optimizer = torch.optim.AdamW([nothing], foreach=False)
        (nothing * nothing).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _collective(address)
    _heal(address, {"model": {"parameter": nothing.detach()}, "optimizer": optimizer.state_dict()})


def _collective(address: str) -> None:
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    group = ResilientGloo(address=address, timeout=_LIMIT)
    group.configure(f"{address}:{store.port}/warm", "standby", 0, 1, global_ranks=[0])
    group.allreduce([torch.zeros(1, device="cpu")], dist.AllreduceOptions()).wait()
    group.shutdown()


def _heal(address: str, state: dict[str, dict[str, object]]) -> None:
    group = ResilientGloo(address=address, timeout=_LIMIT)
    transport = StripedTransport(replica=0, token=secrets.token_hex(16), address=address, neighbours=group)
    try:
        parts: dict[str, Callable[[], object]] = {
            key: functools.partial(dict, part) for key, part in state.items()
        }
        replicated = Replicated(parts=frozenset(parts))
        transport.serve(Source(parts=parts, replicated=replicated, step=lambda: 0, failed=lambda: False))
        transport.meet(0)
        transport.send_checkpoint([0], 0, {"user": state}, _LIMIT)
        transport.recv_checkpoint(0, transport.metadata(), 0, _LIMIT)
    finally:
        transport.shutdown(wait=False)
