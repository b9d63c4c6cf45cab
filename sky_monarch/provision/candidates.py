"""Which choice of the plan a host tries next. Pure: no clock, no thread, nobody is asked.

A job is in one place as a whole. While none of its hosts is up, one of them, the scout, tries the choices in
order, each once; the others wait for what it finds. Once a host is up, the job stays there: the others are
launched in that choice (and in the very zone of the first, where the plan says that they follow it), however
often that fails, and no good host is given up for another choice. Where all hosts are lost, the next scout begins
with the choice that they were in.

Where choices place groups on hosts in different ways, a host is launched in the way that the controller has taken, and
no other: the scout has it take the next one, and hears what is wanted there, until a host is up. From then on choices
that place groups otherwise are out.

A round of choices that all failed is over for every attempt that has taken part in it, or begins within a moment of
it: the same reasons for all. When another one is due is up to the controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sky_monarch.provision.classify import worst
from sky_monarch.provision.provider import Kind, Turn

__all__ = ["Candidates", "Exhausted", "Reason"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a choice did not work out.

    Attributes:
        choice: Its number.
        kind: What that means.
        text: In words.
    """

    choice: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """An attempt that has nothing left to try.

    Attributes:
        kind: What its reasons come to.
        reasons: One for each choice that was tried, in the order of the plan.
    """

    kind: Kind
    reasons: tuple[Reason, ...]


@dataclass(slots=True)
class _Round:
    """One pass through the choices."""

    number: int = 0
    tried: list[Reason] = field(default_factory=list)


class Candidates:
    """The choices of one job.

    Args:
        count: How many there are, at least one.
        follow: Of each choice, whether hosts follow the first one to its zone.
        homes: Of each choice, replica groups by host; none: all place them alike.
        hold_s: How long the end of a round counts for attempts that begin after it: what nobody had a moment ago,
            nobody has now.
    """

    def __init__(
        self,
        count: int,
        *,
        follow: Sequence[bool] = (),
        homes: Sequence[Mapping[str, Sequence[int]]] = (),
        hold_s: float = 0.0,
    ) -> None:
        if count < 1:
            raise ValueError("a plan has at least one choice")
        self._count = count
        self._follow = list(follow) or [False] * count
        self._homes = [{host: tuple(mine) for host, mine in one.items()} for one in homes] or [{}] * count
        self._varies = any(one != self._homes[0] for one in self._homes)
        self._placement = 0
        self._placings = 0
        self._heard = True
        self._up: set[str] = set()
        self._choice: int | None = None  # of the hosts that are up, or last were
        self._infra: str | None = None
        self._scout: str | None = None
        self._round = _Round()
        self._joined: dict[str, tuple[int, int]] = {}  # attempt and round of each host that asks
        self._refused: dict[int, Reason] = {}
        self._verdict: Exhausted | None = None
        self._hold_s = hold_s
        self._over_s = -math.inf

    @property
    def settled(self) -> int | None:
        """The choice that the job is in; None while no host is up."""
        return self._choice if self._up else None

    def homes(self, choice: int) -> Mapping[str, Sequence[int]]:
        """Replica groups by host in a choice."""
        return self._homes[choice]

    def is_placed(self, choice: int) -> bool:
        """Whether groups are placed as a choice needs it."""
        return self._homes[choice] == self._homes[self._placement]

    @property
    def placings(self) -> int:
        """How often groups were placed at our word."""
        return self._placings

    @property
    def heard(self) -> bool:
        """Whether the controller has said, since groups were placed at our word, what it wants of hosts there."""
        return self._heard

    def place(self, choice: int) -> None:
        """The controller was told to place groups for this choice. What it wants of hosts by now it has yet to say."""
        self._heard = self._heard and self._placement == choice
        self._placement = choice
        self._placings += 1

    def placed(self, choice: int, *, placings: int | None = None) -> None:
        """The controller says for which choice groups are placed.

        Args:
            choice: Number of it.
            placings: Their number when it was asked: an answer that was on its way while groups were placed anew may
                be of before that. None: it is of now.
        """
        current = choice == self._placement or placings in (None, self._placings)
        if current and 0 <= choice < self._count:
            self._placement = choice
            self._heard = True

    @property
    def hosts_up(self) -> list[str]:
        """Hosts that are up, as far as it was told."""
        return sorted(self._up)

    @property
    def scout(self) -> str | None:
        """The host that finds out; None while none does."""
        return self._scout

    def join(self, host: str, attempt: int, now_s: float = 0.0) -> None:
        """An attempt begins: it takes part in the round that is under way."""
        known = self._joined.get(host)
        if known is None or known[0] != attempt:
            late = now_s - self._over_s < self._hold_s
            self._joined[host] = (attempt, self._round.number - late)

    def next(self, host: str, attempt: int, now_s: float = 0.0) -> Turn | Exhausted | None:
        """What this attempt of a host tries now; None: it waits for what the scout finds."""
        if (choice := self.settled) is not None:
            if not self.is_placed(choice):
                return None  # the controller's word on it is on its way
            return Turn(choice=choice, infra=self._infra if self._follow[choice] else None)
        self.join(host, attempt, now_s)
        if self._joined[host][1] < self._round.number:
            return self._verdict
        left = self._left()
        if not left:
            return self._over(now_s)
        alone = len(left) == 1 and not self._round.tried and not self._follow[left[0]]
        if alone and self.is_placed(left[0]):
            return Turn(choice=left[0])  # nothing to find out: all at once
        if self._scout not in (None, host) or (self._varies and host not in self._homes[left[0]]):
            return None
        self._scout = host
        return Turn(choice=left[0])

    def up(self, host: str, choice: int, infra: str | None) -> None:
        """A host is up: the job stays where it is."""
        if not self._up:
            self._choice, self._infra = choice, infra
        self._up.add(host)
        self._scout = None
        self._round = _Round(self._round.number)

    def failed(self, host: str, choice: int, kind: Kind, text: str, now_s: float = 0.0) -> Exhausted | None:
        """A host did not come up in a choice; None: it asks for the next one."""
        reason = Reason(choice=choice, kind=kind, text=text)
        if self.settled is not None:
            self._let_go(host)
            return Exhausted(kind=kind, reasons=(reason,))
        if kind is Kind.REFUSED:
            self._refused[choice] = reason
        if self._scout != host:  # launched beside others in the only choice: its own failure, nobody else's
            if kind is not Kind.REFUSED or self._left():
                return Exhausted(kind=kind, reasons=(reason,))
            return self._over(now_s)
        self._round.tried.append(reason)
        if kind is Kind.CREDENTIALS or not self._left():
            return self._over(now_s)
        if self._varies and host not in self._homes[self._left()[0]]:
            self._scout = None  # the next place has no such host: another one finds out, or nobody ever would
        return None

    def gone(self, host: str) -> None:
        """A host is not up any more, or does not try any more."""
        self._up.discard(host)
        if not self._up:
            self._infra = None
        self._let_go(host)

    def _let_go(self, host: str) -> None:
        if self._scout == host:
            self._scout = None

    def _order(self) -> list[int]:
        """The choices as they are tried: that of the hosts that were up last comes first."""
        first = self._choice
        return sorted(range(self._count), key=lambda choice: (choice != first, choice))

    def _left(self) -> list[int]:
        tried = {reason.choice for reason in self._round.tried}
        left = [choice for choice in self._order() if choice not in tried and choice not in self._refused]
        if self._choice is None:
            return left
        return [choice for choice in left if self._homes[choice] == self._homes[self._choice]]

    def _over(self, now_s: float) -> Exhausted:
        """End the round: whoever was in it has the same verdict."""
        tried = {reason.choice: reason for reason in (*self._refused.values(), *self._round.tried)}
        reasons = tuple(tried[choice] for choice in sorted(tried))
        self._verdict = Exhausted(kind=worst(reason.kind for reason in reasons), reasons=reasons)
        self._round = _Round(self._round.number + 1)
        self._scout = None
        self._over_s = now_s
        return self._verdict

    def to_json(self) -> dict[str, Any]:
        """What a restart has to know."""
        return {
            "up": sorted(self._up),
            "choice": self._choice,
            "infra": self._infra,
            "scout": self._scout,
            "placement": self._placement,
            "round": self._round.number,
            "tried": [asdict(reason) for reason in self._round.tried],
            "joined": self._joined,
            "refused": [asdict(reason) for reason in self._refused.values()],
            "verdict": None
            if self._verdict is None
            else {"kind": self._verdict.kind, "reasons": [asdict(one) for one in self._verdict.reasons]},
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on where another process was."""
        verdict = values.get("verdict")
        self._up = set(values.get("up") or ())
        self._choice, self._infra = values.get("choice"), values.get("infra")
        self._scout = values.get("scout")
        self.placed(int(values.get("placement") or 0))
        self._round = _Round(values.get("round", 0), _reasons(values.get("tried")))
        self._joined = {host: (int(a), int(r)) for host, (a, r) in (values.get("joined") or {}).items()}
        self._refused = {reason.choice: reason for reason in _reasons(values.get("refused"))}
        self._verdict = verdict and Exhausted(
            kind=Kind(verdict["kind"]), reasons=tuple(_reasons(verdict["reasons"]))
        )


def _reasons(values: Any) -> list[Reason]:
    return [Reason(**{**value, "kind": Kind(value["kind"])}) for value in values or ()]
