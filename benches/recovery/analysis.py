"""What the logs say: pure functions from events, kills and quorums to figures.

Times are seconds of CLOCK_MONOTONIC, of one host. A *commit* is a step that got further than this rank's group ever
was; a step done again (after a restart from a checkpoint) is none.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
#: Logs of all ranks by ``(group, rank)``.
Logs = Mapping[tuple[int, int], Sequence[Event]]
#: Wire ids of the members of each new quorum, in order.
Quorums = Sequence[Collection[str]]

STALL_WINDOW_S = 10.0
# Survivors are watched until the newcomer is in and this much longer: its arrival costs them as well.
_AFTER_REJOIN_S = 1.0
# All groups train undisturbed for at least this long before a kill.
SETTLE_S = 2.0
# What failed this shortly before a kill was under way at the kill.
_JUST_BEFORE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One failure: one or more groups killed, or nobody (the lighthouse was).

    Attributes:
        at_s: When the first signal was sent.
        groups: When each group was killed.
        pids: All pids that were killed.
    """

    at_s: float
    groups: Mapping[int, float]
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillFigures:
    """What one kill cost.

    Attributes:
        gap_s: Longest commit interval of the worst survivor.
        stall_s: Time that the worst survivor lost: sum of (commit interval - its median interval).
        stall_window_s: Over which ``stall_s`` was summed.
        undisturbed_stall_s: The same sum over the undisturbed time just before the kill, scaled to that window:
            what the machine's unrest alone comes to.
        stall_net_s: ``stall_s`` less what each survivor loses in the same time when nothing happens, as all its
            undisturbed windows of the run together say.
        rejoin_s: Kill to first commit of the killed group; of the last one where several were. None: no group
            was killed.
        lost_steps: Steps of the worst survivor that failed or had to be done again.
    """

    gap_s: float
    stall_s: float
    stall_window_s: float
    undisturbed_stall_s: float
    stall_net_s: float
    rejoin_s: float | None
    lost_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Whether all ranks hold the same bits.

    Attributes:
        final_step: Last step at which all ranks logged a digest of parameters and optimizer state; None:
            there is none.
        final_equal: They were equal.
        compared: Steps at which checksums of at least two ranks were compared.
        disagreements: Steps at which those differed.
    """

    final_step: int | None
    final_equal: bool
    compared: int
    disagreements: tuple[int, ...]

    @property
    def bit_equal(self) -> bool:
        """Equal at the end and at every step compared."""
        return self.final_equal and not self.disagreements and self.compared > 0


def commits(events: Iterable[Event]) -> list[Event]:
    """Steps that got further than all before them."""
    furthest, found = -1, []
    for event in _done(events):
        if event["step"] > furthest:
            furthest = event["step"]
            found.append(event)
    return found


def usual_interval_s(events: Iterable[Event]) -> float:
    """Median time between two commits of one process.

    Raises:
        ValueError: There are no two commits.
    """
    done = commits(events)
    intervals: list[float] = [b["t"] - a["t"] for a, b in itertools.pairwise(done) if a["pid"] == b["pid"]]
    if not intervals:
        raise ValueError("no process committed two steps")
    return statistics.median(intervals)


def steps_per_s(logs: Logs) -> float:
    """Of the groups' first ranks, the median."""
    return 1.0 / statistics.median(usual_interval_s(events) for (_, rank), events in logs.items() if not rank)


def unrest(kills: Sequence[Kill], logs: Logs) -> dict[int, float]:
    """What a group loses in one second when nothing happens: the mean over the time just before each kill."""
    leads = {group: events for (group, rank), events in logs.items() if rank == 0}
    return {
        group: statistics.mean(_stall_s(events, kill.at_s - SETTLE_S, kill.at_s) for kill in kills) / SETTLE_S
        for group, events in leads.items()
    }


def figures_of(kill: Kill, logs: Logs, *, until_s: float, unrest_of: Mapping[int, float]) -> KillFigures:
    """What ``kill`` cost.

    Args:
        kill: The failure.
        logs: Of all ranks; the first rank of each group speaks for it.
        until_s: The next kill, or the end: nothing later counts.
        unrest_of: As :func:`unrest` says.

    Raises:
        ValueError: A killed group did not come back before ``until_s``.
    """
    leads = {group: events for (group, rank), events in logs.items() if rank == 0}
    back_s, in_again_s = {}, kill.at_s if kill.groups else until_s
    for group, at_s in kill.groups.items():
        back_s[group] = _first_s(_done(leads[group]), at_s, until_s, pids_not=kill.pids)
        further_s = _first_s(commits(leads[group]), at_s, until_s, pids_not=kill.pids)
        in_again_s = max(in_again_s, further_s)
    gap_end_s = min(in_again_s + _AFTER_REJOIN_S, until_s)
    stall_end_s = min(kill.at_s + STALL_WINDOW_S, until_s)
    settled_s = kill.at_s - SETTLE_S
    alive = [group for group in leads if group not in kill.groups]
    survivors = [leads[group] for group in alive]
    window_s = stall_end_s - kill.at_s
    stalls_s = {group: _stall_s(leads[group], kill.at_s, stall_end_s) for group in alive}
    return KillFigures(
        gap_s=max(max(_intervals(events, kill.at_s, gap_end_s)) for events in survivors),
        stall_s=max(stalls_s.values()),
        stall_window_s=window_s,
        undisturbed_stall_s=max(_stall_s(events, settled_s, kill.at_s) for events in survivors)
        * window_s
        / SETTLE_S,
        stall_net_s=max(stall_s - unrest_of[group] * window_s for group, stall_s in stalls_s.items()),
        rejoin_s=max((back_s[group] - at_s for group, at_s in kill.groups.items()), default=None),
        lost_steps=max(lost_steps(events, kill.at_s - _JUST_BEFORE_S, until_s) for events in survivors),
    )


def _done(events: Iterable[Event]) -> list[Event]:
    """Steps that succeeded, also those that had been done before."""
    return [event for event in events if event["event"] == "step" and event["ok"]]


def _first_s(
    events: Iterable[Event], after_s: float, until_s: float, *, pids_not: Collection[int] = ()
) -> float:
    for event in events:
        if after_s < event["t"] < until_s and event["pid"] not in pids_not:
            return float(event["t"])
    raise ValueError(f"a group killed at {after_s:.3f} s was not back at {until_s:.3f} s")


def _intervals(events: Sequence[Event], start_s: float, end_s: float) -> list[float]:
    """Commit intervals from the last commit before ``start_s``; the last one may be cut short by ``end_s``."""
    times = [event["t"] for event in commits(events)]
    before = [t for t in times if t <= start_s][-1:]
    inside = [t for t in times if start_s < t <= end_s]
    marks = [*(before or [start_s]), *inside, end_s]
    return [b - a for a, b in itertools.pairwise(marks)]


def _stall_s(events: Sequence[Event], start_s: float, end_s: float) -> float:
    usual_s = usual_interval_s(events)
    *whole, cut = _intervals(events, start_s, end_s)
    # The interval that the window cuts counts only with what it is already too long.
    return sum(interval - usual_s for interval in whole) + max(0.0, cut - usual_s)


def lost_steps(events: Sequence[Event], start_s: float, end_s: float) -> int:
    """Attempts of one rank that failed, or did again what was done before."""
    steps = [event for event in events if event["event"] == "step"]
    done = {id(event) for event in commits(steps)}
    return sum(1 for event in steps if start_s < event["t"] < end_s and id(event) not in done)


def equality(logs: Logs) -> Equality:
    """Compare checksums and final digests over all ranks."""
    checksums: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    digests: dict[int, dict[tuple[int, int], str]] = defaultdict(dict)
    for who, events in logs.items():
        for event in events:
            if "crc" in event:
                checksums[event["step"]][who] = event["crc"]
            elif event["event"] == "final":
                digests[event["step"]][who] = event["sha"]
    compared = {step: set(found.values()) for step, found in checksums.items() if len(found) > 1}
    final_step = max((step for step, found in digests.items() if found.keys() == logs.keys()), default=None)
    return Equality(
        final_step=final_step,
        final_equal=final_step is not None and len(set(digests[final_step].values())) == 1,
        compared=len(compared),
        disagreements=tuple(sorted(step for step, values in compared.items() if len(values) > 1)),
    )


def furthest_step(logs: Logs) -> int:
    """Of any rank; -1 before the first."""
    return max((event["step"] for events in logs.values() for event in _done(events)), default=-1)


def current_step(logs: Logs) -> int:
    """Where the ranks are now: less than the furthest after all died and began anew; -1 before the first."""
    latest = (
        next((e for e in reversed(events) if e["event"] == "step" and e["ok"]), None)
        for events in logs.values()
    )
    return max((event["step"] for event in latest if event is not None), default=-1)


def in_step(logs: Logs, *, after_s: float, not_pids: Collection[int], beyond: int = -1) -> bool:
    """Whether all ranks have committed two steps in a row together after ``after_s``.

    Two, since a newcomer takes part in the first only to be healed.

    Args:
        logs: Of all ranks.
        after_s: Older commits do not count.
        not_pids: Nor do commits of these.
        beyond: Nor do steps up to this one: after a restart from a checkpoint they were done before.
    """
    all_recent = []
    for events in logs.values():
        # Not the last event: a standby may have written that.
        last = next((event for event in reversed(events) if event["event"] == "step"), None)
        if last is None or last["pid"] in not_pids:
            return False
        recent: set[int] = {
            event["step"]
            for event in events[-40:]
            if event["event"] == "step"
            and event["ok"]
            and event["t"] > after_s
            and event["step"] > beyond
            and event["pid"] == last["pid"]
        }
        all_recent.append(recent)
    common = set.intersection(*all_recent)
    return any(step + 1 in common for step in common)


def parse_torchft_quorums(log: str) -> list[frozenset[str]]:
    """Members of each quorum that TorchFT's lighthouse logged, by wire id (``name:uuid``)."""
    return [
        frozenset(re.findall(r'replica_id: "([^"]+)"', line))
        for line in log.splitlines()
        if "Quorum! Quorum {" in line
    ]


def came_back(quorums: Quorums) -> int:
    """How often a member left and came back: a live one that was dropped, as a restart has a new wire id."""
    count, gone = 0, set[str]()
    previous: Collection[str] = ()
    for members in quorums:
        count += len(gone & set(members))
        gone = (gone | set(previous)) - set(members)
        previous = members
    return count


def left_unkilled(quorums: Quorums, killed: Collection[str]) -> int:
    """How many members left for good without being in ``killed`` (wire ids)."""
    ever = {member for members in quorums for member in members}
    last = set(quorums[-1]) if quorums else set()
    return len(ever - last - set(killed))


def ratio(ours: float, theirs: float) -> float:
    """Ours to theirs; not a number where theirs is 0."""
    return ours / theirs if theirs else math.nan
