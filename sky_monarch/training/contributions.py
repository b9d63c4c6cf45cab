"""How many samples each replica group put into a step: the weights of its gradients in the mean."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from sky_monarch.errors import ConfigError, QuorumError
from sky_monarch.training.environment import RankEnvironment
from sky_monarch.training.sampler import Sampler

if TYPE_CHECKING:
    from torchft import Manager

__all__ = ["Contributions"]

logger = logging.getLogger(__name__)

# Lost batches that are told with each commit: the newest, for so many steps.
_MOST_TOLD, _TOLD_STEPS = 64, 200


class Contributions:
    """The counts of one step, summed up beside its gradients.

    TorchFT divides a sum of gradients by the number of participating groups, which is the mean over their
    *samples* only where all have equally many. So each rank multiplies its own mean gradient by
    ``samples / unit`` before, and all multiply the average by :attr:`correction` after. Where all have
    ``unit`` samples, both are exactly 1 and nothing is multiplied.

    FSDP averages over the ranks of a group during the backward pass, when it is too late to multiply what each
    of them has: there it is the loss that is multiplied, by :meth:`weigh`, where their numbers may differ.

    Args:
        env: This rank's place.
        device: Of the gradients: what is reduced beside them lies there too.
        sampler: Counts this rank's samples where the recipe does not; begins with the session.
        seed: Of the run.
        sharded: Whether the ranks of a group share gradients before they come here.
    """

    def __init__(
        self,
        env: RankEnvironment,
        device: torch.device,
        sampler: Sampler | None,
        *,
        seed: int,
        sharded: bool = False,
    ) -> None:
        self._even = sharded and env.world_size > 1
        self._weighed: int | None = None
        self._own = 0
        self._replica, self._world_size = env.replica, env.world_size
        self._sampler = sampler
        self._unit = 1 if sampler is None else sampler.batch_size
        self._group = torch.zeros(1, dtype=torch.int64, device=device)  # of this group
        self._counts = self._group  # of each member
        self._members: list[int] = [env.replica]
        self._participants = 0
        self._logged = (0, 0)
        self.offered = False
        self.by_replica: dict[int, int] = {}
        if sampler is not None:
            sampler.bind(
                seed=seed,
                replica=env.replica,
                replicas=env.replicas,
                rank=env.rank,
                world_size=env.world_size,
            )

    def begin(self) -> None:
        """Begin a step: nothing is weighed yet."""
        self._weighed = None

    def weigh(self, loss: torch.Tensor, samples: int | None) -> torch.Tensor:
        """``loss``, a mean over so many samples of this rank, with their weight; adds up over a step.

        Raises:
            ConfigError: Nobody says how many they are.
        """
        if samples is None:
            if self._sampler is None:
                raise ConfigError("without a sampler a loss is weighed by `samples`, which were not given")
            samples = self._sampler.share
        self._weighed = samples + (self._weighed or 0)
        return loss if samples == self._unit else loss * (samples / self._unit)

    def offer(self, samples: int | None, members: Sequence[int] = ()) -> float:
        """Begin an attempt with so many samples of this rank; returns the weight of its gradients.

        Args:
            samples: None for those of the sampler; where there is none, groups weigh the same, uncounted.
            members: Groups of the quorum, this one among them; none where the attempt is this group's alone.

        Raises:
            ConfigError: They were said with the loss already, or FSDP would mix what weighs differently.
        """
        if self._weighed is not None:
            if samples is not None:
                raise ConfigError("`samples` were given to weigh() already", hint="say them there alone")
            samples = self._weighed
        if self._sampler is not None:
            share = self._sampler.share
            ragged = not self._sampler.drop_last and self._sampler.dataset_len % self._sampler.batch_size
            if self._even and ragged and samples is None:
                raise ConfigError(
                    "the last batch of an epoch is short, of one rank of a group whose ranks shard the model "
                    "and so average their gradients unweighed",
                    hint="session.weigh(loss).backward(), or Sampler(..., drop_last=True)",
                )
            samples = share if samples is None or share == 0 else samples
        self.offered = samples is not None
        self.by_replica = {}
        self._own = samples or 0
        # One place for each of the quorum, which all of them know alike: not of the run, which may be scaled.
        self._members = list(members) if self._replica in members else [self._replica]
        self._group.fill_(self._own)
        if samples is None:
            return 1.0
        if self._weighed is not None:
            # What FSDP has shared is not of this rank alone; a group that was dealt nothing gives nothing.
            return 0.0 if self._sampler is not None and self._sampler.share == 0 else 1.0
        return samples / self._unit

    def require_even(self) -> None:
        """Once the counts of this group are summed up: refuse what FSDP has averaged with wrong weights.

        Raises:
            ConfigError: This rank has more or fewer samples than the mean of the group.
        """
        if self._even and self._weighed is None and self.offered:
            group = int(self._group)
            if group != self._own * self._world_size:
                raise ConfigError(
                    f"this rank has {self._own} samples, its group of {self._world_size} {group}: they shard "
                    "the model, and FSDP averages their gradients unweighed",
                    hint="session.weigh(loss, samples).backward(), and no samples at step_optimizer()",
                )

    def within(self, inner: dist.ProcessGroup) -> dist.Work:
        """Begin to sum up over the ranks of this group."""
        return inner.allreduce([self._group], dist.AllreduceOptions())

    def across(self, manager: Manager) -> dist.Work:
        """Begin to sum up over the groups. One that heals counts nothing."""
        self._participants = manager.num_participants()
        self._counts = self._group.new_zeros(len(self._members))
        self._counts[self._members.index(self._replica)] = self._group[0]
        return manager.allreduce(self._counts, reduce_op=dist.ReduceOp.SUM)

    def settle(self, manager: Manager) -> None:
        """Read what the others counted, once it has come; nobody's step with no sample is committed."""
        self.by_replica = dict(zip(self._members, self._counts.tolist(), strict=True))
        if self.total == 0:
            manager.report_error(QuorumError("no group contributes a sample"))

    def settle_within(self) -> None:
        """Read what the ranks of this group counted, for a step that is this group's alone."""
        self._participants = 1
        self.by_replica = {self._replica: int(self._group)}

    @property
    def total(self) -> int:
        """Samples of the step: the effective batch."""
        return sum(self.by_replica.values())

    @property
    def correction(self) -> float:
        """By what the average over the groups is multiplied, to be one over the samples."""
        return self._participants * self._world_size * self._unit / self.total if self.total else 1.0

    def committed(self, step: int, members: Sequence[int]) -> dict[str, float]:
        """Move the sampler on, where there is one; returns metrics of the step.

        Args:
            step: That was committed, counted from 0.
            members: Groups of the quorum that committed it.
        """
        if not self.offered:
            return {}
        if (self.total, len(members)) != self._logged:
            self._logged = (self.total, len(members))
            logger.info("step %d: the effective batch is %d, of %d groups", step, self.total, len(members))
        metrics = {"effective_batch": float(self.total)}
        if self._sampler is not None:
            self._sampler.advance(step, self.by_replica, members)
            metrics |= {
                "epoch": float(self._sampler.epoch),
                "lost_samples": float(self._sampler.lost_samples),
            }
            # Told for a while, and by all: of progress only the latest is kept.
            metrics |= {
                f"lost_batch_{lost.number}_step_{lost.step}_replica_{lost.replica}": float(
                    self._sampler.size_of(lost.number)
                )
                for lost in self._sampler.lost[-_MOST_TOLD:]
                if lost.step > step - _TOLD_STEPS
            }
        return metrics
