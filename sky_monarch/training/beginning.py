"""The first step: every group must begin with the same bits."""

from __future__ import annotations

import torch
from torch import distributed as dist

from sky_monarch.errors import ConfigError
from sky_monarch.training.manager import SessionManager

__all__ = ["all_begin_equal"]


def all_begin_equal(manager: SessionManager, digest: str, *, round_steps: int) -> bool:
    """Compare the parameters of all groups of the quorum; False if one left meanwhile.

    Args:
        manager: Its quorum has come.
        digest: Of this group's parameters.
        round_steps: Steps between two of this group's averages.

    Raises:
        ConfigError: They differ, or some groups average in each step and others do not.
    """
    word = int(digest[:15], 16)
    extremes = torch.tensor([word, -word, round_steps, -round_steps], dtype=torch.int64)
    manager.allreduce(extremes, reduce_op=dist.ReduceOp.MAX).wait()
    if manager.errored() is not None:
        return False
    if int(extremes[0]) != -int(extremes[1]):
        raise ConfigError(
            "the replica groups start from different parameters",
            hint="call seed_everything(seed) with one seed before the model is built",
        )
    if int(extremes[2]) != -int(extremes[3]):
        raise ConfigError(
            "the replica groups differ in `sync`", hint="leave it to the job, or give all the same argument"
        )
    return True
