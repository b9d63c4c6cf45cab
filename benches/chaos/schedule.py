"""What fails, when, and whose it is: drawn from a seed, so that every peer suffers the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "exit", "hang", "two", "lighthouse", "controller")
# Each of them comes once before any comes again; kills, the commonest, twice.
_BAG = ("kill", *KINDS)
_JITTER = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure.

    Attributes:
        at_s: Seconds after all groups were in step.
        kind: One of :data:`KINDS`.
        victims: Groups; none where lighthouse or controller is killed.
    """

    at_s: float
    kind: str
    victims: tuple[int, ...]


def draw(
    *, seed: int, seconds: float, every_s: float, groups: int, kinds: Sequence[str] = KINDS
) -> tuple[Failure, ...]:
    """A schedule.

    Args:
        seed: Of all that is drawn.
        seconds: Length of the run. The last failure comes at least half of ``every_s`` before its end.
        every_s: Mean time between two failures.
        groups: To choose victims from; at least two survive each failure.
        kinds: Those that occur.
    """
    drawn = random.Random(seed)
    failures: list[Failure] = []
    bag: list[str] = []
    at_s = every_s / 2
    while at_s <= seconds - every_s / 2:
        if not bag:
            bag = [kind for kind in _BAG if kind in kinds]
            drawn.shuffle(bag)
        kind = bag.pop()
        count = {"two": 2, "lighthouse": 0, "controller": 0}.get(kind, 1)
        failures.append(Failure(at_s=at_s, kind=kind, victims=tuple(drawn.sample(range(groups), count))))
        at_s += every_s * drawn.uniform(1 - _JITTER, 1 + _JITTER)
    return tuple(failures)
