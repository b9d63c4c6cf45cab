"""Which samples each rank takes in each step, so that over all deaths and returns none is used twice.

An epoch is an order of the dataset, cut into batches, numbered on over all epochs. Each commit says where
the next step begins (``cursor``) and who takes part in it (``members``): the groups that were in the quorum
of that commit, whether they computed or healed. Of ``n`` groups with ``r`` ranks each, the rank ``k`` of the
``i``-th group takes the batch ``cursor + i * r + k``, and the next step begins at ``cursor + n * r``.

Before the first commit, and before the first one after a restart of all, nobody knows who takes part: there group ``i``
takes the place ``i``, and all places up to the highest one of the quorum that commits are dealt. So it is no matter
how many groups there were to be when each of them started.

All of it is known before the quorum of the step is, so nobody waits for that. It is equal on all groups
after each commit, and heals with the rest of the state: no server hands out anything. A member that dies,
hangs or leaves before its batch is committed takes the batch with it; the others list it as lost. It is not
dealt out again: a sample that kills whoever computes on it would kill one group after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sky_monarch.errors import ConfigError
from sky_monarch.training.permutation import permuted

__all__ = ["LostBatch", "Sampler"]

logger = logging.getLogger(__name__)

# Each is a death or a departure; the count goes on beyond.
_MOST_LISTED = 10_000
# Samples that a line of the log names.
_MOST_NAMED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBatch:
    """A batch that was dealt out and never committed.

    Attributes:
        step: The step that went on without it, counted as in ``before_update``: from 0.
        replica: Had it.
        number: Counts the batches of all epochs.
    """

    step: int
    replica: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Where the run is in its data; replaced as a whole, since donors read it from another thread."""

    cursor: int
    members: tuple[int, ...]
    open: bool = False  # whoever is in the quorum that commits was dealt to: `members` is only a guess
    lost: tuple[LostBatch, ...] = ()
    lost_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """This rank's place in the run."""

    seed: int
    replica: int
    replicas: int
    rank: int
    world_size: int


class Sampler:
    """Deals out the samples of a dataset; handed to the session as ``Session(..., sampler=...)``.

    Args:
        dataset_len: Samples, the same number on all groups, in the same order.
        batch_size: Samples a rank and step.
        shuffle: A new order each epoch, of the session's seed; else the dataset's own.
        drop_last: Leave out the short batch at the end of an epoch. Kept, its samples count like all
            others: the session weighs each rank's gradients by its samples.

    Raises:
        ConfigError: No whole batch would be left, or a number is out of range.
    """

    def __init__(
        self, dataset_len: int, batch_size: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        if dataset_len < 1 or batch_size < 1:
            raise ConfigError(
                f"dataset_len is {dataset_len} and batch_size {batch_size}; both must be at least 1"
            )
        if drop_last and batch_size > dataset_len:
            raise ConfigError(
                f"batch_size is {batch_size}, but there are {dataset_len} samples: drop_last leaves none"
            )
        self.dataset_len, self.batch_size = dataset_len, batch_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self._place: _Place | None = None
        self._position = _Position(cursor=0, members=())
        self._taken = 0

    # What a recipe asks.

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one rank and step that an epoch is cut into."""
        return self.dataset_len // self.batch_size + (not self.drop_last and self._remainder > 0)

    @property
    def epoch(self) -> int:
        """Epochs that are dealt out, equal on all groups after each commit."""
        return self._position.cursor // self.batches_per_epoch

    @property
    def lost(self) -> Sequence[LostBatch]:
        """Batches that no step used, oldest first; the last 10,000 of them."""
        return self._position.lost

    @property
    def lost_samples(self) -> int:
        """Samples that no step used, over the whole run."""
        return self._position.lost_samples

    @property
    def batch_number(self) -> int:
        """Of this rank and step, counted over all epochs. The same until the step is committed."""
        return self.number_ahead(0)

    def indices(self) -> torch.Tensor:
        """The samples of this rank in this step: int64, shape ``(n,)``, ``1 <= n <= batch_size``.

        The same until the step is committed. A group that heals gets some as well, and what it computes on
        them is not used: it does not know yet where the others are.
        """
        return self.indices_of(self.batch_number)

    # For whoever fetches batches before their step begins.

    def number_ahead(self, steps: int) -> int:
        """This rank's batch after so many further commits, if meanwhile nobody comes or goes.

        Raises:
            ConfigError: The session is not entered.
        """
        place, position = self._bound(), self._position
        # No member: a group on its way to its first commit, which is about to heal.
        turn = position.members.index(place.replica) if place.replica in position.members else 0
        turn = place.replica if position.open else turn
        step_size = max(1, len(position.members)) * place.world_size
        return position.cursor + (self._taken + steps) * step_size + turn * place.world_size + place.rank

    def indices_of(self, number: int) -> torch.Tensor:
        """The samples of one batch: int64, shape ``(n,)``."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        first = batch * self.batch_size
        places = torch.arange(first, first + self.size_of(number))
        return (
            permuted(places, self.dataset_len, seed=self._bound().seed, epoch=epoch)
            if self.shuffle
            else places
        )

    def size_of(self, number: int) -> int:
        """Samples of one batch."""
        last = number % self.batches_per_epoch == self.batches_per_epoch - 1
        short = last and not self.drop_last and self._remainder > 0
        return self._remainder if short else self.batch_size

    # The session's side.

    def bind(self, *, seed: int, replica: int, replicas: int, rank: int, world_size: int) -> None:
        """Learn which rank this is, and begin at the first sample with every group that is there then."""
        self._place = _Place(seed=seed, replica=replica, replicas=replicas, rank=rank, world_size=world_size)
        self._position = _Position(cursor=0, members=tuple(range(replicas)), open=True)

    def all_take_part(self) -> None:
        """Deal to every group that is there, after a restart of all from a checkpoint."""
        members = tuple(range(self._bound().replicas))
        self._position = replace(self._position, members=members, open=True)

    def deal_to(self, members: Sequence[int]) -> None:
        """Deal the same batches to others: nobody of those they were dealt to is there to use them."""
        self._position = replace(self._position, members=tuple(sorted(members)), open=False)
        self._taken = 0

    def deal_to_first(self, places: int) -> None:
        """Learn from others how many places were dealt, where all groups begin: a group has the place of its number."""
        if self._position.open:
            self._position = replace(self._position, members=tuple(range(places)), open=False)

    @property
    def places(self) -> int:
        """How many places are dealt in each step."""
        return len(self._position.members)

    def take(self) -> None:
        """Go on to the batch of the next step, before this one is committed: between two outer steps."""
        self._taken += 1

    def give_back(self) -> None:
        """The steps since the last commit are to be done again."""
        self._taken = 0

    @property
    def share(self) -> int:
        """Samples that this rank may contribute to this step; 0 where the group was dealt none."""
        if self._bound().replica not in self._position.members and not self._position.open:
            return 0
        return self.size_of(self.batch_number)

    def advance(
        self, step: int, contributed: Mapping[int, int], members: Sequence[int], *, steps: int = 1
    ) -> None:
        """A step was committed, or some at once; called on every group, with the same arguments.

        Args:
            step: The first of them, as ``before_update`` counts.
            contributed: Samples by replica group; who is missing has none.
            members: Groups of the quorum that committed it: those that take part in the next step.
            steps: How many.
        """
        position, world_size = self._position, self._bound().world_size
        if position.open:
            position = replace(position, members=tuple(range(max(members, default=0) + 1)))
        step_size = len(position.members) * world_size
        lost = [
            LostBatch(
                step=step + ahead,
                replica=replica,
                number=position.cursor + ahead * step_size + turn * world_size + rank,
            )
            for ahead in range(steps)
            for turn, replica in enumerate(position.members)
            if not contributed.get(replica)
            for rank in range(world_size)
        ]
        samples = sum(self.size_of(batch.number) for batch in lost)
        if lost:
            places = [place for batch in lost for place in self.indices_of(batch.number).tolist()]
            more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
            logger.warning(
                "step %d went on without %d samples of replicas %s: %s%s",
                step,
                samples,
                sorted({batch.replica for batch in lost}),
                places[:_MOST_NAMED],
                more,
            )
        self._position = _Position(
            cursor=position.cursor + steps * step_size,
            members=tuple(sorted(members)),
            lost=(*position.lost, *lost)[-_MOST_LISTED:],
            lost_samples=position.lost_samples + samples,
        )
        self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. Read from another thread while the step computes."""
        position = self._position
        return {
            "of": self._of(),
            "cursor": position.cursor,
            "members": list(position.members),
            "open": int(position.open),
            "lost": [(batch.step, batch.replica, batch.number) for batch in position.lost],
            "lost_samples": position.lost_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another group is, or a checkpoint was.

        Raises:
            ConfigError: It is a position in other data, or in other batches.
        """
        if state["of"] != self._of():
            raise ConfigError(
                f"the data position is one in {state['of']}, but this process has {self._of()}",
                hint="keep dataset, batch size and seed for a whole run; "
                "to train on with others, save under a new `checkpoint.to`",
            )
        self._position = _Position(
            cursor=state["cursor"],
            members=tuple(state["members"]),
            open=bool(state.get("open")),  # older ones knew how many groups there are
            lost=tuple(
                LostBatch(step=step, replica=replica, number=number)
                for step, replica, number in state["lost"]
            ),
            lost_samples=state["lost_samples"],
        )
        self._taken = 0

    def _of(self) -> dict[str, int]:
        return {
            "dataset_len": self.dataset_len,
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
            "seed": self._bound().seed,
        }

    @property
    def _remainder(self) -> int:
        return self.dataset_len % self.batch_size

    def _bound(self) -> _Place:
        if self._place is None:
            raise ConfigError(
                "the sampler is of no session yet", hint="Session(..., sampler=sampler), then `with session:`"
            )
        return self._place
