"""What another number of replica groups would change, and why it cannot be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sky_monarch.controller.model import GroupPhase, Limits, RunPhase, State
from sky_monarch.controller.room import Room
from sky_monarch.controller.turn import count_of
from sky_monarch.errors import ConfigError

__all__ = ["ScalePlan", "plan_scale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What changes.

    Attributes:
        previous: Replica groups that the run has.
        replicas: That it is to have.
        start: Those that begin.
        stop: Those that leave.
        homes: Groups that there never were, by host.
        launch: Hosts that are asked for.
        end: Hosts that are let go once they are empty.
        notes: What else to know.
    """

    previous: int
    replicas: int
    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    homes: Mapping[str, tuple[int, ...]]
    launch: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_change(self) -> bool:
        """Whether anything is to be done."""
        return self.previous != self.replicas

    def document(self, *, dry_run: bool) -> dict[str, Any]:
        """The answer of the API."""
        return {
            "previous": self.previous,
            "replicas": self.replicas,
            "changed": self.is_change and not dry_run,
            "dry_run": dry_run,
            "start": list(self.start),
            "stop": list(self.stop),
            "launch": list(self.launch),
            "end": list(self.end),
            "notes": list(self.notes),
        }


def plan_scale(state: State, limits: Limits, replicas: int, room: Room) -> ScalePlan:
    """Plan it.

    Args:
        state: Of the run.
        limits: Of the run.
        replicas: Groups that it is to have.
        room: For how many there is.

    Raises:
        ConfigError: It cannot be; says what would.
    """
    _require_open(state)
    if replicas == state.replicas:
        return ScalePlan(previous=replicas, replicas=replicas, homes={})
    if replicas < state.replicas:
        return _shrink(state, limits, replicas)
    room.require(replicas)
    return _grow(state, replicas, room)


def _require_open(state: State) -> None:
    ending = state.phase is RunPhase.STOPPING or state.phase.ended
    if ending or state.outcome is not None:
        raise ConfigError(
            f"the run is ending: {state.reason or state.phase}",
            hint="set replicas in the job file, and start it again",
        )
    if state.groups[0].span is not None:
        raise ConfigError(
            "its groups have several hosts each, and such a run keeps the groups that it began with",
            hint="set replicas in the job file, and start it again",
        )
    if state.groups.tally.done:
        done = [group.replica for group in state.groups if group.phase is GroupPhase.DONE]
        raise ConfigError(
            f"the run is ending: replica {done[0]} has reached the target",
            hint="set replicas in the job file, and start it again",
        )


def _shrink(state: State, limits: Limits, replicas: int) -> ScalePlan:
    if replicas < limits.min_replicas:
        raise ConfigError(
            f"{count_of(replicas, 'replica group')} would be fewer than min_replicas, which is {limits.min_replicas}",
            hint=f"give {limits.min_replicas} or more, or end the run with `sky-monarch down`",
        )
    kept = state.groups[:replicas]
    able = sum(group.able or group.dropped for group in kept)
    if able < limits.min_replicas:
        lost = [group.replica for group in kept if group.missed]
        fewest = next(
            (
                number
                for number in range(replicas + 1, state.replicas)
                if sum(not group.missed for group in state.groups[:number]) >= limits.min_replicas
            ),
            state.replicas,
        )
        raise ConfigError(
            f"{_names(lost)} cannot go on, so of {replicas} groups {able} would be left, and min_replicas is "
            f"{limits.min_replicas}",
            hint=f"give {fewest} or more: those with the highest numbers leave",
        )
    leaving = [group for group in state.groups[replicas:] if not group.dropped]
    stop = tuple(group.replica for group in leaving if not group.phase.final)
    end = tuple(
        host.name
        for host in state.hosts
        if host.provisioned and host.replicas and not host.over and min(host.replicas) >= replicas
    )
    awaited = [group.replica for group in kept if group.away and group.able]
    notes: tuple[str, ...] = ()
    if awaited and stop:
        notes = (f"{_names(stop)} will leave once {_names(awaited)} is there, whose host is awaited",)
    return ScalePlan(previous=state.replicas, replicas=replicas, homes={}, stop=stop, end=end, notes=notes)


def _grow(state: State, replicas: int, room: Room) -> ScalePlan:
    known = len(state.groups)
    again = [
        group for group in state.groups[state.replicas : replicas] if group.phase is not GroupPhase.GIVEN_UP
    ]
    given_up = [
        group.replica
        for group in state.groups[state.replicas : replicas]
        if group.phase is GroupPhase.GIVEN_UP
    ]
    homes = _homes(state, range(known, replicas), room)
    asked = [name for name in homes if name not in state.places]
    asked += [host.name for host in map(state.host, {group.host: None for group in again}) if host.over]
    notes = (f"{_names(given_up)} was given up, which stays so",) if given_up else ()
    return ScalePlan(
        previous=state.replicas,
        replicas=replicas,
        start=(*(group.replica for group in again), *range(known, replicas)),
        homes=homes,
        launch=tuple(sorted(asked, key=lambda name: (len(name), name))),
        notes=notes,
    )


def _homes(state: State, new: Iterable[int], room: Room) -> dict[str, tuple[int, ...]]:
    """Where groups go that there never were: to hosts that have a place, then to new ones."""
    homes: dict[str, tuple[int, ...]] = {}
    provisioned = [host for host in state.hosts if host.provisioned and host.replicas]
    if not provisioned:
        here = next(host for host in state.hosts if host.replicas)
        mine = tuple(new)
        return {here.name: mine} if mine else {}
    taken = {host.name: len(host.replicas) for host in provisioned if not host.over}
    number = room.next_number(host.name for host in state.hosts)
    for replica in new:
        name = min((one for one in taken if taken[one] < room.on(one)), key=taken.__getitem__, default=None)
        if name is None:
            name = room.name_of(number)
            number += 1
            taken[name] = 0
        taken[name] += 1
        homes[name] = (*homes.get(name, ()), replica)
    return homes


def _names(replicas: Iterable[int]) -> str:
    return ", ".join(f"replica {replica}" for replica in replicas)
