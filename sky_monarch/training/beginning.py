"""The first step: every group must begin with the same bits."""

from __future__ import annotations

import torch
from torch import distributed as dist

from sky_monarch.errors import ConfigError, QuorumError
from sky_monarch.training.manager import SessionManager
from sky_monarch.training.resilient import Resilient
from sky_monarch.training.sampler import Sampler

__all__ = ["all_begin_equal", "go_on_from_checkpoint"]


def go_on_from_checkpoint(manager: SessionManager, group: Resilient, sampler: Sampler | None) -> None:
    """End this attempt at a step, once the state of a checkpoint is in place.

    The lighthouse must hear of the new step, also from a member that cannot read it.
    """
    if sampler is not None:
        sampler.all_take_part()
    manager.report_error(QuorumError(f"continuing from the checkpoint of step {manager.current_step()}"))
    group.cut()


def all_begin_equal(manager: SessionManager, digest: str, *, round_steps: int) -> None:
    """Compare the parameters of all groups of the quorum. If one left meanwhile, the manager has an error.

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
        return
    if int(extremes[0]) != -int(extremes[1]):
        raise ConfigError(
            "the replica groups start from different parameters",
            hint="call seed_everything(seed) with one seed before the model is built",
        )
    if int(extremes[2]) != -int(extremes[3]):
        raise ConfigError(
            "the replica groups differ in `sync`", hint="leave it to the job, or give all the same argument"
        )
