"""A state on its way into this process, where that takes longer than one step.

Parameters come one by one, each with its optimizer's moments: from the step on at which it has come, the joiner applies
the averaged gradients to it as everybody does. What the script registered comes as it is, and may change again. So at
the end all of it is compared with the donor's, and what differs is read once more: how well the joiner has kept up
decides how long that takes, never what it ends with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sky_monarch.training.healing.encoding import decode
from sky_monarch.training.healing.offer import Manifest
from sky_monarch.training.sharding import MODEL

__all__ = ["Arrival", "Batch", "Following"]

# Read between two looks at whether the others wait: some milliseconds on one host.
_BATCH_BYTES = 16 << 20
# In each step at least such a part of the state comes, waited for or not: so it ends.
_LEAST_PART = 64
# A joiner that loses its way so often, or takes so many steps, has the others wait, as there is no better way.
_MOST_LOST, _MOST_STEPS = 3, 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """What is read at once.

    Attributes:
        names: Parameters that are complete with it.
        ranges: Where it begins in the donor's memory, and the tensors that lie there, one after the other.
    """

    names: tuple[str, ...]
    ranges: Sequence[tuple[int, list[torch.Tensor]]]


@dataclass(slots=True)
class _Unit:
    """A parameter and what the optimizer has of it: numbers of tensors in the donor's range."""

    numbers: list[int] = field(default_factory=list)
    nbytes: int = 0


class Arrival:
    """What has come so far.

    Args:
        manifest: Of the donor.
        places: A tensor for each of it.
        names: Of the parameters, in the order of the optimizer.

    Attributes:
        places: Where the state lies, or will.
        step: Of what is here.
        began_s: When the first word came, on the monotonic clock.
        moved: Bytes that were read.
        steps: In how many of them something was read.
        gave: Of what all have alike, bytes that each replica group gave.
        held: Whether the others are to wait until all of it has come.
    """

    def __init__(self, manifest: Manifest, places: list[torch.Tensor], names: Sequence[str]) -> None:
        self.places, self.step, self.began_s = places, manifest.step, time.monotonic()
        self.moved = self.steps = self._lost = 0
        self.gave: dict[int, int] = {}
        self.held = False
        self._shapes, self._paths = manifest.shapes, manifest.paths
        pairs = list(zip(places, manifest.paths, strict=True))
        self.common = [tensor for tensor, path in pairs if path is not None]
        self.own = [tensor for tensor, path in pairs if path is None]
        self._offsets: list[int] = []
        self._units: dict[str, _Unit] = {}
        self._rest: list[int] = []
        offset = 0
        paths = [path for path in manifest.paths if path is not None]
        for number, (path, tensor) in enumerate(zip(paths, self.common, strict=True)):
            self._offsets.append(offset)
            offset += tensor.nbytes
            name = _parameter_of(path, names)
            if name is None:
                self._rest.append(number)
            else:
                unit = self._units.setdefault(name, _Unit())
                unit.numbers.append(number)
                unit.nbytes += tensor.nbytes
        self.nbytes: int = offset + sum(tensor.nbytes for tensor in self.own)
        self._here: set[str] = set()
        self._own_here = 0

    def fits(self, manifest: Manifest) -> bool:
        """Whether the state is made of the same tensors."""
        return list(manifest.paths) == list(self._paths) and list(manifest.shapes) == list(self._shapes)

    def go_on_at(self, step: int) -> None:
        """What is here of another step than ``step`` is nothing worth."""
        if step != self.step:
            self._lost += bool(self._here)
            self._here.clear()
            self.step = step
        self.steps += 1
        self.held |= self._lost >= _MOST_LOST or self.steps > _MOST_STEPS

    @property
    def here(self) -> frozenset[str]:
        """Parameters that are those of the others, with their moments."""
        return frozenset(self._here)

    @property
    def least_bytes(self) -> int:
        """What is read in a step even where the others wait for it."""
        return max(_BATCH_BYTES, self.nbytes // _LEAST_PART)

    def rest(self) -> Batch | None:
        """What belongs to no parameter, but is needed in each step."""
        return Batch((), self._ranges(self._rest)) if self._rest else None

    def missing(self) -> Iterator[Batch]:
        """Parameters that are not here, in batches."""
        names: list[str] = []
        nbytes = 0
        for name, unit in self._units.items():
            if name in self._here:
                continue
            names.append(name)
            nbytes += unit.nbytes
            if nbytes >= _BATCH_BYTES:
                yield self._batch(names)
                names, nbytes = [], 0
        if names:
            yield self._batch(names)

    def own_missing(self) -> Iterator[Batch]:
        """What only the assigned donor has and has not been seen here, in batches."""
        offset: int = sum(tensor.nbytes for tensor in self.own[: self._own_here])
        while self._own_here < len(self.own):
            taken: list[torch.Tensor] = []
            nbytes = 0
            for tensor in self.own[self._own_here :]:
                taken.append(tensor)
                nbytes += tensor.nbytes
                if nbytes >= _BATCH_BYTES:
                    break
            yield Batch((), [(offset, taken)])
            self._own_here += len(taken)
            offset += nbytes

    def came(self, batch: Batch) -> None:
        """It was read whole."""
        self._here.update(batch.names)

    def _batch(self, names: Sequence[str]) -> Batch:
        numbers = sorted(number for name in names for number in self._units[name].numbers)
        return Batch(tuple(names), self._ranges(numbers))

    def _ranges(self, numbers: Sequence[int]) -> list[tuple[int, list[torch.Tensor]]]:
        ranges: list[tuple[int, list[torch.Tensor]]] = []
        last = -2
        for number in numbers:
            if number == last + 1:
                ranges[-1][1].append(self.common[number])
            else:
                ranges.append((self._offsets[number], [self.common[number]]))
            last = number
        return ranges


def _parameter_of(path: tuple[str, ...], names: Sequence[str]) -> str | None:
    """Which parameter a tensor belongs to: itself, or the optimizer's of it."""
    if path[0] == MODEL:
        return path[1]
    if path[:2] == ("optimizer", "state") and len(path) > 3 and path[2].isdecimal():
        index = int(path[2])
        return names[index] if index < len(names) else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """A step that this process takes part in while its state is still coming: with zeros, as who heals always does.

    Attributes:
        step: Of the parameters that are here.
        here: Their names.
        tree: The donor's state as JSON values.
        arrival: What it is a part of.
    """

    step: int
    here: frozenset[str]
    tree: Any
    arrival: Arrival

    def optimizer_state(self) -> Any:
        """The donor's, of this step; of parameters that are not here its tensors hold anything."""
        return decode(self.tree, self.arrival.places)["user"]["optimizer"]

    def lies_in(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer works on the very tensors that the state comes into."""
        places = {tensor.data_ptr() for tensor in self.arrival.common}
        held = [one for state in optimizer.state.values() for one in state.values()]
        tensors = [one for one in held if isinstance(one, torch.Tensor) and one.nbytes]
        return all(one.data_ptr() in places for one in tensors)

    def applied(self) -> None:
        """What is here is of the next step now."""
        self.arrival.step = self.step + 1

    def give_up(self) -> None:
        """This process cannot keep up: from now on the others wait."""
        self.arrival.held = True
