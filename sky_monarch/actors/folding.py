"""Answers that are combined on their way.

The ranks of each other host hand theirs to the first of them, which folds them in the order of their ranks; the caller
gets one value from each host.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from sky_monarch.actors import serial
from sky_monarch.actors.context import point_at
from sky_monarch.actors.future import ERROR, FAILED, VALUE, Future, raise_first
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.actors.runtime import CONTROL, runtime
from sky_monarch.errors import SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.future import Answer
    from sky_monarch.actors.hosting import Hosted

__all__ = ["PLAN", "Folds", "Plan", "fold", "reduce"]

#: Keyword of the plan beside those of the endpoint; no parameter has such a name.
PLAN = "&"
#: Answers of so many calls are folded in one process at a time; where there are more, the oldest is given up: then the
#: one who called has ended, and with it a rank that was to hand its answer over.
_MOST_FOLDS = 1024


class Group(NamedTuple):
    """Neighbouring ranks of one host.

    Attributes:
        first: Position of the first of them, which folds what they answer.
        end: Position behind the last.
        address: Of the process of the first.
    """

    first: int
    end: int
    address: str


class Plan(NamedTuple):
    """Who folds what.

    Attributes:
        number: Names the call.
        combine: Of two values, the left one of lower ranks.
        groups: In the order of ranks. Who is in none answers the caller.
    """

    number: int
    combine: Callable[[Any, Any], Any]
    groups: tuple[Group, ...]

    def group_of(self, position: int) -> Group | None:
        """The group that a position is in."""
        return next((group for group in self.groups if group.first <= position < group.end), None)


def _plan(mesh: ActorMesh, combine: Callable[[Any, Any], Any]) -> Plan:
    here = runtime().folder
    addresses = mesh._addresses_of()
    groups = []
    for folder, some in groupby(range(len(addresses)), lambda at: os.path.dirname(addresses[at])):  # noqa: PTH120
        positions = list(some)
        if folder != here and len(positions) > 1:
            groups.append(Group(positions[0], positions[-1] + 1, addresses[positions[0]]))
    return Plan(int.from_bytes(os.urandom(7), "big") + 1, combine, tuple(groups))


def reduce(
    mesh: ActorMesh,
    method: str,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    identity: Any,
    combine: Callable[[Any, Any], Any],
) -> Any:
    """Call ``method`` of every actor, and fold what they answer in the order of their ranks."""
    from sky_monarch._core import ActorTargets

    args, kwargs = call
    plan = _plan(mesh, combine)
    payload = serial.dump_call(args, {**kwargs, PLAN: plan})
    replies = mesh._call(mesh._targets(), f"{method}{PLAN}", payload)

    def settle(answers: list[Answer], mesh: ActorMesh, method: str) -> Any:
        raise_first(answers, mesh, method)
        total = identity
        for slot, _, body, buffers in sorted(answers, key=lambda answer: answer[0]):
            group = plan.group_of(slot)
            if group is None or group.first == slot:
                total = combine(total, serial.loads(body, buffers))
        return total

    done = False
    try:
        found: Any = Future(replies, settle, mesh, method).get()
        done = True
        return found
    finally:
        if not done and plan.groups:
            replies.cancel()
            firsts = ActorTargets([(group.address, "") for group in plan.groups])
            runtime().node.send(firsts, CONTROL, "unfold", *serial.dumps(plan.number))


def fold(hosted: Hosted, request: ActorRequest, plan: Plan, value: Any) -> None:
    """Hand what an endpoint returned to whoever folds it."""
    from sky_monarch._core import ActorTargets

    place = request.open()[1]
    position = point_at(place).rank if place else hosted.point.rank
    group = plan.group_of(position)
    if group is not None and group.first == position:
        hosted.runtime.folds.lead(request, plan, group, value)
        return
    answer = serial.dump_result(value)
    if group is not None:
        # Where its receiver is gone, the caller hears of that end by itself.
        target = ActorTargets([(group.address, f"{plan.number} {position}")])
        hosted.runtime.node.send(target, CONTROL, "fold", *answer)
        answer = serial.dump_result(None)
    hosted.answer(request, *answer)


class _Fold:
    """One call's answers of one host."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Any, list[Any]]] = {}
        self.request: ActorRequest | None = None
        self.plan: Plan | None = None
        self.total: Any = None
        self.next = 0
        self.end = 0
        self.busy = False


class Folds:
    """What this process folds for others."""

    def __init__(self) -> None:
        self.open: dict[int, _Fold] = {}
        #: Calls that have failed: some ranks may answer yet.
        self._over: dict[int, None] = {}
        self._lock = threading.Lock()

    def _of(self, number: int) -> _Fold:
        found = self.open.get(number)
        if found is None:
            if len(self.open) >= _MOST_FOLDS:
                self._give_up(next(iter(self.open)))
            found = self.open[number] = _Fold()
        return found

    def lead(self, request: ActorRequest, plan: Plan, group: Group, value: Any) -> None:
        """Answer ``request`` with ``value`` and those that are put, once all of the group are there."""
        with self._lock:
            one = self._of(plan.number) if plan.number not in self._over else _Fold()
            one.request, one.plan, one.total = request, plan, value
            one.next, one.end = group.first + 1, group.end
            self._go_on(plan.number, one)

    def put(self, place: str, body: Any, buffers: list[Any]) -> None:
        """A rank hands its answer over."""
        number, position = map(int, place.split())
        with self._lock:
            if number in self._over:
                return
            one = self._of(number)
            one.waiting[position] = (body, buffers)
            self._go_on(number, one)

    def forget(self, number: int) -> None:
        """Nobody waits for that any more."""
        with self._lock:
            self._over[number] = None
            if len(self._over) > _MOST_FOLDS:
                del self._over[next(iter(self._over))]
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        one = self.open.pop(number, None)
        if one is not None and one.request is not None:
            words = "what other ranks have answered was not folded: another one has failed"
            with suppress(SkyMonarchError):  # whoever called has ended
                one.request.reply(FAILED, *serial.dumps(RemoteError.of(SupervisionError(words))))

    def _go_on(self, number: int, one: _Fold) -> None:
        # In a thread of its own: it runs code of the program, and may take long.
        if one.request is not None and one.next in one.waiting and not one.busy:
            one.busy = True
            name = f"sky-monarch-fold-{number}"
            threading.Thread(target=self._work, args=(number, one), name=name, daemon=True).start()

    def _work(self, number: int, one: _Fold) -> None:
        request, plan = one.request, one.plan
        assert request is not None and plan is not None  # noqa: PT018, S101  (looked at before)
        try:
            while one.next < one.end:
                with self._lock:
                    found = one.waiting.pop(one.next, None)
                    if found is None:
                        one.busy = False
                        return
                one.total = plan.combine(one.total, serial.loads(*found))
                one.next += 1
            kind, answer = VALUE, serial.dump_result(one.total)
        except BaseException as error:  # noqa: BLE001  (the caller is told)
            kind, answer = ERROR, serial.dumps(RemoteError.of(error))
        with self._lock:
            if self.open.pop(number, None) is None:
                return  # nobody waits for it any more
        try:
            request.reply(kind, *answer)
        except Exception as error:  # noqa: BLE001  (no memory, too large: the caller is told, unless it has ended)
            with suppress(SkyMonarchError):
                request.reply(ERROR, *serial.dumps(RemoteError.of(error)))
