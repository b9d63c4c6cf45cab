"""The replica groups of a run: one of them changes, the others are shared, and what all of them come to is at hand.

A decision costs the same whether a run has ten groups or ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from sky_monarch.controller.phases import GroupPhase, PartPhase

__all__ = ["Group", "Groups", "Part", "Span", "Tally"]

_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one host has of a wide group.

    Attributes:
        host: Its name.
        ranks: The group's ranks there: the first, and the one after the last.
        phase: How far it is, in the group's newest generation.
    """

    host: str
    ranks: tuple[int, int]
    phase: PartPhase = PartPhase.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is special about a wide group, one that has several hosts.

    Attributes:
        parts: By node; the first one's host serves the group's store.
        store: Where that is, in this generation.
        began_ns: When this generation began.
        fallen: Why this generation is over on all hosts; None while it is not.
        free: That costs no restart: a host was taken away.
        fruitless: Restarts in a row that brought no progress.
        resting: The next start waits for a pause to be over.
        never_ran: Why the command did not run at all in this generation; None where it did, or may have.
        vain: Generations in a row in which it did not.
    """

    parts: tuple[Part, ...]
    store: str | None = None
    began_ns: int | None = None
    fallen: str | None = None
    free: bool = False
    fruitless: int = 0
    resting: bool = False
    never_ran: str | None = None
    vain: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing of any generation is left on any host."""
        return all(part.phase is PartPhase.IDLE for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One replica group.

    Attributes:
        replica: Its number.
        host: Host that it lives on; the first one of a wide group.
        phase: What it is doing.
        generation: Newest generation known; 0 before the first start.
        started: A start was ordered.
        up: All its ranks ran at once, at least one time.
        live: Ranks alive now.
        restarts_ns: When the restarts of the current window were scheduled.
        reason: Why it is where it is; None where nothing went wrong.
        step: Step it was done at; None where no session said one.
        failed_after: What went wrong after it was done.
        host_lost: Its host counts as lost: nobody waits for it.
        away: Its host is being provisioned (again): it is waited for, and no process of it counts. Of a wide group: one
            of its hosts is.
        dropped: The run was scaled below it: nobody waits for it, or misses it.
        span: Its parts, where it has several hosts.
    """

    replica: int
    host: str
    phase: GroupPhase = GroupPhase.PENDING
    generation: int = 0
    started: bool = False
    up: bool = False
    live: frozenset[int] = frozenset()
    restarts_ns: tuple[int, ...] = ()
    reason: str | None = None
    step: int | None = None
    failed_after: str | None = None
    host_lost: bool = False
    away: bool = False
    dropped: bool = False
    span: Span | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts that it lives on."""
        return (self.host,) if self.span is None else tuple(part.host for part in self.span.parts)

    @property
    def at_rest(self) -> bool:
        """Whether no process of it can be left."""
        return not self.live and (self.phase.final or not self.started)

    @property
    def able(self) -> bool:
        """Whether it finished, or still can."""
        if self.dropped:
            return False
        if self.phase is GroupPhase.DONE:
            return True
        return not self.host_lost and self.phase not in (GroupPhase.GIVEN_UP, GroupPhase.STOPPED)

    @property
    def missed(self) -> bool:
        """Whether the run should have it and cannot any more."""
        return not self.able and not self.dropped


class Tally(NamedTuple):
    """How many groups are what. Nobody waits for those of lost hosts."""

    able: int
    """Finished, or still can."""
    unfinished: int
    """Waited for: neither done nor over."""
    restless: int
    """Waited for: processes may be left."""
    running: int
    """Able, and they commit."""
    never_up: int
    """Able, and their ranks have never run all at once."""
    started: int
    done: int
    live: int
    """Have live ranks."""
    away: int
    """Able, and their host is awaited."""
    dropped: int
    """The run was scaled below them."""


def _marks(group: Group) -> Tally:
    able, waited, phase = group.able, not group.host_lost, group.phase
    return Tally(
        able,
        waited and not phase.final,
        waited and not group.at_rest,
        able and phase is GroupPhase.RUNNING,
        able and not group.up,
        group.started,
        phase is GroupPhase.DONE,
        bool(group.live),
        able and group.away and phase is not GroupPhase.DONE,
        group.dropped,
    )


@dataclass(frozen=True, slots=True)
class Groups(Sequence[Group]):
    """All groups by replica; never changed in place.

    Attributes:
        tally: How many of them are what.
        unable: Replicas that are missed, for they are not able any more, in order; the very same object while they
            stay the same.
    """

    _chunks: tuple[tuple[Group, ...], ...]
    tally: Tally
    unable: tuple[int, ...]

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Groups:
        """Those groups, which stand in the order of their replicas."""
        all_ = tuple(groups)
        chunks = tuple(all_[start : start + _CHUNK] for start in range(0, len(all_), _CHUNK))
        counts = zip(*map(_marks, all_), strict=True) if all_ else [()] * len(Tally._fields)
        tally = Tally(*(sum(column) for column in counts))
        return cls(chunks, tally, tuple(group.replica for group in all_ if group.missed))

    def with_one(self, group: Group) -> Groups:
        """The same with ``group`` in place of the one of that replica."""
        place, inside = divmod(group.replica, _CHUNK)
        chunk = self._chunks[place]
        before = chunk[inside]
        chunk = (*chunk[:inside], group, *chunk[inside + 1 :])
        chunks = (*self._chunks[:place], chunk, *self._chunks[place + 1 :])
        old, new, tally = _marks(before), _marks(group), self.tally
        if old != new:
            tally = Tally(*(total - gone + come for total, gone, come in zip(tally, old, new, strict=True)))
        unable = self.unable
        if before.missed != group.missed:
            at = bisect_left(unable, group.replica)
            unable = (
                (*unable[:at], group.replica, *unable[at:])
                if group.missed
                else (*unable[:at], *unable[at + 1 :])
            )
        return Groups(chunks, tally, unable)

    def __len__(self) -> int:
        return _CHUNK * (len(self._chunks) - 1) + len(self._chunks[-1]) if self._chunks else 0

    def __iter__(self) -> Iterator[Group]:
        for chunk in self._chunks:
            yield from chunk

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...
    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place, inside = divmod(index % len(self), _CHUNK)
        return self._chunks[place][inside]
