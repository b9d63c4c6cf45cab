"""What a run of failures yielded: pure functions from the ranks' logs.

Times are seconds of CLOCK_MONOTONIC. The logs hold every commit; where all groups died at once and nothing was saved,
training begins anew, and what was committed before is *undone*: it does not count.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benches.recovery import analysis
from benches.recovery.analysis import Event, Logs

BATCH = 32
#: So many evaluations, in a row, are one figure: a single one wavers with the last few updates.
EVALUATIONS = 5
# Groups log the same step one after the other: whoever is this close behind did not begin anew.
_ABREAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """At ``at_s`` training went on with ``step``, which had been committed before, and so had later ones."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """What was committed in a stretch of time, and stayed.

    Attributes:
        seconds: Length of the stretch.
        steps: Distinct ones.
        samples: Of all groups whose gradients were in those steps.
        undone: Steps that were committed in it and did not stay.
        last_step: The last of them; 0 without any.
        longest_stall_s: Longest time in which no group committed anything.
    """

    seconds: float
    steps: int
    samples: int
    undone: int
    last_step: int
    longest_stall_s: float

    @property
    def samples_per_s(self) -> float:
        """Mean over the stretch."""
        return self.samples / self.seconds

    @property
    def groups_per_step(self) -> float:
        """How many groups took part in a step, on average."""
        return self.samples / BATCH / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A group that was hit.

    Attributes:
        at_s: When.
        group: Which.
        pid: Its process then.
        deadly: It did not survive; a process that was only stopped may have.
    """

    at_s: float
    group: int
    pid: int
    deadly: bool = True


def rollbacks(logs: Logs) -> list[Rollback]:
    """When training began anew further back.

    A process that was stopped between a commit and the line about it logs an old step, too; but then the others go
    on from where they were.
    """
    found = []
    furthest = 0
    done = [event for _, event in _commits(logs)]
    for number, event in enumerate(done):
        following = done[number + 1 : number + 3]
        if event["step"] < furthest - _ABREAST and following:
            if all(later["step"] < furthest - _ABREAST for later in following):
                found.append(Rollback(at_s=event["t"], step=event["step"]))
                furthest = event["step"]
        else:
            furthest = max(furthest, event["step"])
    return found


def lasting(logs: Logs) -> dict[tuple[int, int], list[Event]]:
    """The logs without what a rollback undid."""
    back = rollbacks(logs)

    def stays(event: Event) -> bool:
        return "step" not in event or not any(
            event["t"] < each.at_s and event["step"] >= each.step for each in back
        )

    return {who: [event for event in events if stays(event)] for who, events in logs.items()}


def harvest(logs: Logs, start_s: float, end_s: float) -> Yield:
    """What was committed between the two moments. A group's step after a heal has none of its samples."""

    def groups_by_step(of: Logs) -> dict[int, set[int]]:
        found: dict[int, set[int]] = defaultdict(set)
        for group, event in _commits(of):
            if start_s < event["t"] <= end_s:
                found[event["step"]] |= {group} if event["gained"] == 1 else set()
        return found

    stayed, all_of_them = groups_by_step(lasting(logs)), groups_by_step(logs)
    times = [event["t"] for _, event in _commits(logs) if start_s < event["t"] <= end_s]
    return Yield(
        seconds=end_s - start_s,
        steps=len(stayed),
        samples=BATCH * sum(len(groups) for groups in stayed.values()),
        undone=len(all_of_them.keys() - stayed.keys()),
        last_step=max(stayed, default=0),
        longest_stall_s=max(b - a for a, b in itertools.pairwise([start_s, *times, end_s])),
    )


def own_pace(logs: Logs) -> float:
    """Samples a second of all groups together, if each step took as long as the median one."""
    return analysis.steps_per_s(lasting(logs)) * BATCH * len(logs)


def lost_steps(logs: Logs, start_s: float, end_s: float) -> list[int]:
    """Of each group, attempts that failed, or did again what was done before."""
    return [analysis.lost_steps(events, start_s, end_s) for events in logs.values()]


def failed_scripts(logs: Logs) -> list[Strike]:
    """Those that were told to fail, and said that they do."""
    return [
        Strike(at_s=event["t"], group=group, pid=event["pid"])
        for (group, _), events in logs.items()
        for event in events
        if event["event"] == "exit"
    ]


def rejoins_s(strikes: Iterable[Strike], logs: Logs) -> list[float]:
    """From each strike to the next commit of its group; one that never came back has none.

    The step that was under way when a process was stopped, or that it still commits before it fails, is none.
    """
    found = []
    for strike in strikes:
        for event in logs[strike.group, 0]:
            if event["event"] != "step" or not event["ok"] or event["t"] <= strike.at_s:
                continue
            if event["pid"] != strike.pid or (not strike.deadly and event["gained"] > 1):
                found.append(event["t"] - strike.at_s)
                break
    return found


def collateral(restarts: int, strikes: Iterable[Strike]) -> int:
    """Restarts of what nobody had hit."""
    return restarts - len({strike.pid for strike in strikes if strike.deadly})


def false_drops(
    quorums: Sequence[Mapping[str, int]], survived: Mapping[int, int], dead: Collection[str]
) -> int:
    """Live groups that a lighthouse dropped.

    Args:
        quorums: Each new one: groups by the wire ids of their members.
        survived: How often each group was stopped, and went on by itself: it was rightly dropped meanwhile.
        dead: Wire ids of processes that ended.
    """
    came_back: Counter[int] = Counter()
    for group in {group for members in quorums for group in members.values()}:
        of_group = [{wire_id for wire_id, its in members.items() if its == group} for members in quorums]
        came_back[group] = max(0, analysis.came_back(of_group) - survived.get(group, 0))
    return came_back.total() + analysis.left_unkilled([set(members) for members in quorums], dead)


def held_out(logs: Logs, start_s: float, end_s: float) -> dict[int, float]:
    """Held-out loss by step, of what stayed."""
    return {
        event["step"]: float(event["held_out"])
        for _, event in _commits(lasting(logs))
        if event.get("held_out") is not None and start_s < event["t"] <= end_s
    }


def last_loss(losses: Mapping[int, float], steps: Collection[int] | None = None) -> float | None:
    """Mean of the last few evaluations, of ``steps`` where given; None without any."""
    wanted = sorted(losses.keys() if steps is None else losses.keys() & set(steps))[-EVALUATIONS:]
    return statistics.mean(losses[step] for step in wanted) if wanted else None


def _commits(logs: Logs) -> list[tuple[int, Event]]:
    """Every commit of the groups' first ranks with its group, in order of time."""
    done = [
        (group, event)
        for (group, rank), events in logs.items()
        for event in events
        if rank == 0 and event["event"] == "step" and event["ok"]
    ]
    return sorted(done, key=lambda each: each[1]["t"])
