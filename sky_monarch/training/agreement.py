"""What the ranks of one replica group have to decide alike: each of them sees only its own peers fail."""

from __future__ import annotations

import logging

import torch
from torch import distributed as dist

from sky_monarch.errors import QuorumError
from sky_monarch.training.manager import SessionManager

__all__ = ["Agreement"]

logger = logging.getLogger(__name__)


class Agreement:
    """The ranks of this group, asked the same question at the same place.

    A rank that went on alone would wait in a collective of the group's model for one that does something
    else.

    Args:
        inner: The ranks of this replica group; None where it has one.
        device: Where a collective of them takes tensors.
    """

    def __init__(self, inner: dist.ProcessGroup | None, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def all(self, word: bool) -> bool:
        """Whether all of them say yes.

        Raises:
            QuorumError: A rank of this replica group left.
        """
        return bool(self._lowest([int(word)])[0])

    def again(self, manager: SessionManager, word: bool) -> bool:
        """After a failed vote: whether all of them can average the gradients that they kept.

        Where the state that a donor gave arrived at some of them only, the group has healed at none: it asks
        for it once more.

        Raises:
            QuorumError: A rank of this replica group left.
        """
        step = manager.current_step()
        again, lowest = self._lowest([int(word), step])
        if lowest < step:
            logger.warning("another rank of this group did not get the state of step %d", step)
            manager.take_back_heal(lowest)
        return bool(again)

    def _lowest(self, words: list[int]) -> list[int]:
        if self._inner is None:
            return words
        numbers = torch.tensor(words, dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        try:
            self._inner.allreduce([numbers], options).wait()
        except RuntimeError as error:
            raise QuorumError(f"another rank of this replica group left: {error}") from error
        lowest: list[int] = numbers.tolist()
        return lowest
