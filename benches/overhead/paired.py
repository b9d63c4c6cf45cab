"""From blocks of steps, in turns, to a ratio and how sure it is: pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benches.recovery.analysis import Logs

#: The first steps of a block are on caches that the other peer has filled.
SKIPPED = 5
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of steps of one peer: of one step and one rank, the mean over all ranks.

    Attributes:
        wall_s: From commit to commit, the median.
        wall_mean_s: The mean.
        cpu_s: Processor time of the rank's process, all its threads, the mean.
        services_cpu_s: Of everything else that the peer runs, by its name: for one step, but not for one rank.
    """

    wall_s: float
    wall_mean_s: float
    cpu_s: float
    services_cpu_s: Mapping[str, float]

    def total_cpu_s(self, ranks: int) -> float:
        """Of ranks and services, for one step."""
        return self.cpu_s * ranks + sum(self.services_cpu_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


def block_of(logs: Logs, first: int, last: int, services_cpu_s: Mapping[str, float]) -> Block:
    """The steps after ``first`` up to ``last``.

    Args:
        logs: Of all ranks.
        first: Where the block began.
        last: Where it ended.
        services_cpu_s: That each service has spent in it.

    Raises:
        ValueError: A rank has not all of its steps, each at the first attempt.
    """
    walls_s, means_s, cpus_s = [], [], []
    for (group, rank), events in logs.items():
        steps = [event for event in events if event["event"] == "step" and first < event["step"] <= last]
        if [event["step"] for event in steps] != list(range(first + 1, last + 1)):
            raise ValueError(f"rank {rank} of group {group} did not take steps {first + 1} to {last} at once")
        steps = steps[SKIPPED:]
        pairs = list(itertools.pairwise(steps))
        walls_s.append(statistics.median(b["t"] - a["t"] for a, b in pairs))
        means_s.append((steps[-1]["t"] - steps[0]["t"]) / len(pairs))
        cpus_s.append((steps[-1]["cpu"] - steps[0]["cpu"]) / len(pairs))
    return Block(
        wall_s=statistics.mean(walls_s),
        wall_mean_s=statistics.mean(means_s),
        cpu_s=statistics.mean(cpus_s),
        services_cpu_s={name: cpu_s / (last - first) for name, cpu_s in services_cpu_s.items()},
    )


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Geometric mean of the rounds' ratios, with Student's interval.

    Args:
        ours: One value a round, the mean of its two blocks.
        theirs: The same of the other peer.

    Raises:
        ValueError: There are fewer than two rounds, or not equally many.
    """
    logs = [math.log(our / their) for our, their in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError("one round says nothing of how sure it is")
    middle = statistics.mean(logs)
    half = _student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def _student(freedom: int) -> float:
    """Two-sided quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else by its expansion."""
    if freedom == 1:
        return math.tan(math.pi * _CONFIDENCE / 2)
    if freedom == 2:
        return _CONFIDENCE * math.sqrt(2 / (1 - _CONFIDENCE**2))
    z = statistics.NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    # Abramowitz and Stegun, 26.7.5; 0.7 % too little with 3 degrees of freedom, and better with each more.
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
