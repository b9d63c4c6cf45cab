"""One host: brought to what the controller wants of it, by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar, cast

import structlog

from sky_monarch.errors import ChannelError, PeerRefusedError
from sky_monarch.provision.candidates import Exhausted
from sky_monarch.provision.classify import plain
from sky_monarch.provision.client import Backoff
from sky_monarch.provision.leaving import Leaving, down_within
from sky_monarch.provision.provider import (
    HostOrder,
    Kind,
    Launched,
    ProvisionError,
    Superseded,
    Turn,
    planned_price,
)
from sky_monarch.provision.requests import Phase, Record
from sky_monarch.provision.shared import Shared

__all__ = ["Host"]

_log = structlog.get_logger()
T = TypeVar("T")
#: Waits are ended by what they wait for; looked at again now and then all the same.
_LOOK_AGAIN_S = 30.0
_CLEAN_UP_S = 120.0
_IN_THE_WAY = (Kind.CAPACITY, Kind.REFUSED)


class Host:
    """A host and its thread.

    Args:
        name: Its name.
        shared: What it shares with the others.
        leaving: Takes down what is left of older attempts.
    """

    def __init__(self, name: str, shared: Shared, leaving: Leaving) -> None:
        self.name = name
        self._leaving = leaving
        self._shared = shared
        self._news = threading.Condition(shared.lock)
        self._order: HostOrder | None = None
        self._done: tuple[int, str] | None = None
        self._ended: Record | None = None
        self._stop = threading.Event()  # set where what is being done is not wanted any more
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def want(self, order: HostOrder) -> None:
        """The controller wants this; anything else that is under way is given up."""
        with self._shared.lock:
            changed = self._order is None or self._order.key != order.key
            self._order = order
            if changed:
                self._stop.set()
                self._news.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def ended(self, attempt: int, reason: str) -> None:
        """It was up, and is not any more. Of any other attempt than is wanted, or said again, it is no news."""
        with self._shared.lock:
            record = self._shared.requests.get(self.name)
            if record is None or record.phase is not Phase.UP or attempt not in (0, record.attempt):
                return
            if self._order is not None and self._order.key != (record.attempt, "up"):
                return  # we are about to end it ourselves, or have done so
            self._shared.gone(self.name)
            self._ended = self._shared.keep(replace(record, phase=Phase.ENDED, reason=reason))
            self._news.notify_all()

    def wake(self) -> None:
        """Look again. The lock is held."""
        self._news.notify_all()

    def close(self, timeout_s: float) -> bool:
        """This process ends: waits are given up, clusters stay. Returns whether the thread has ended."""
        with self._shared.lock:
            self._stop.set()
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                try:
                    task()
                except Superseded:
                    continue
        except BaseException:
            self._shared.fail()
            raise

    def _next(self) -> Callable[[], None] | None:
        """What there is to do; None where this process ends."""
        with self._shared.lock:
            while not self._shared.closing.is_set():
                if (record := self._ended) is not None:
                    self._ended = None
                    return lambda: self._report(record, "ended")
                order = self._order
                if order is not None and order.key != self._done:
                    self._stop = threading.Event()
                    return lambda: self._bring(order)
                self._news.wait(_LOOK_AGAIN_S)
        return None

    def _await(self, probe: Callable[[], T | None]) -> T:
        """Wait for something that is not None.

        Raises:
            Superseded: Something else is wanted by now.
        """
        shared = self._shared
        with shared.lock:
            shared.waiting.add(self)
            try:
                while not (self._stop.is_set() or shared.closing.is_set()):
                    if (found := probe()) is not None:
                        return found
                    self._news.wait(_LOOK_AGAIN_S)
            finally:
                shared.waiting.discard(self)
        raise Superseded

    def _pause(self, backoff: Backoff) -> None:
        if self._stop.wait(backoff.delay_s()) or self._shared.closing.is_set():
            raise Superseded

    def _backoff(self) -> Backoff:
        return Backoff(self._shared.limits.backoff_s, self._shared.limits.backoff_max_s)

    def _again(self, ask: Callable[[], T], what: str) -> T:
        """Ask a provider, and again where an error came in between, a few times.

        Raises:
            ProvisionError: Its last answer.
            Superseded: Something else is wanted by now.
        """
        backoff = self._backoff()
        for left in reversed(range(self._shared.limits.retries)):
            try:
                return ask()
            except ProvisionError as error:
                if error.kind is not Kind.ERROR or not left:
                    raise
                _log.warning("tried again", what=what, host=self.name, error=plain(str(error)))
            self._pause(backoff)
        raise AssertionError("asked at least once")

    def _bring(self, order: HostOrder) -> None:
        if order.want == "down":
            self._take_down(order)
        else:
            self._bring_up(order)
        self._done = order.key

    # --- up ---------------------------------------------------------------------------------------

    def _bring_up(self, order: HostOrder) -> None:
        record = self._shared.requests.get(self.name)
        try:
            if record is None:
                record = self._recognise(order)
            elif record.attempt != order.attempt:
                self._retire(record)
                record = None
        except ProvisionError as error:
            kind, text = error.kind, plain(str(error))
            failed = Record(host=self.name, attempt=order.attempt, phase=Phase.FAILED, kind=kind, reason=text)
            self._report(failed, "failed")
            return
        if record is None:
            record = self._shared.keep(Record(host=self.name, attempt=order.attempt, phase=Phase.LAUNCHING))
        elif record.phase is not Phase.LAUNCHING:
            # Another process of us brought it there: the controller may not have heard of it.
            state = {Phase.UP: "launched", Phase.ENDED: "ended", Phase.FAILED: "failed"}[record.phase]
            self._report(record, state)
            return
        try:
            self._launch(order, record)
        except Superseded:
            if not self._shared.closing.is_set():  # else it goes on where it was, in the next process
                self._shared.gone(self.name)
            raise

    def _recognise(self, order: HostOrder) -> Record | None:
        """A cluster of this host's name for which this run never asked is somebody else's, and not touched.

        Where it cannot be known who asked, one of the attempt that is wanted counts as that: if it is not, its agent
        is refused by the controller, which then wants another attempt.
        """
        shared, provider = self._shared, self._shared.provider
        if self._leaving.left(self.name):
            return None  # of this very host's own past: there was an attempt, and this one is new
        found = self._again(lambda: provider.found(self.name), "look for clusters")
        if shared.requests.lost and order.attempt in found.values():
            found = {name: attempt for name, attempt in found.items() if attempt != order.attempt}
            self._end_found(found)
            return shared.keep(Record(host=self.name, attempt=order.attempt, phase=Phase.UP))
        if shared.requests.lost or order.replaces is not None:  # ours, then: there was an older attempt
            self._end_found(found)
            if order.attempt in found.values():  # this very name: one of the two can have it
                self._older_gone()
        elif order.attempt in found.values():
            raise ProvisionError(
                f"there is a cluster {order.cluster} already, which this run did not launch: "
                "take it down, or give the job another name",
                kind=Kind.REFUSED,
            )
        return None

    def _end_found(self, found: Mapping[str, int]) -> None:
        for attempt in found.values():
            self._leaving.retire(Record(host=self.name, attempt=attempt, phase=Phase.UP))

    def _retire(self, record: Record) -> None:
        """What is left of the attempt before goes beside the launch of this one; at most one goes at a time."""
        self._shared.gone(self.name)
        if not record.asked:
            self._drop()
            return
        self._older_gone()
        self._leaving.retire(record)

    def _older_gone(self) -> None:
        """Wait until nothing is left of attempts before the one that has a record.

        Raises:
            ProvisionError: One of them does not go.
        """

        def gone() -> bool | ProvisionError | None:
            left = self._leaving.left(self.name)
            return self._leaving.trouble(self.name) if left else True

        if isinstance(left := self._await(gone), ProvisionError):
            text = f"an older attempt may still be there, and bill: {left}"
            raise ProvisionError(text, kind=left.kind)

    def _launch(self, order: HostOrder, record: Record) -> None:
        shared = self._shared
        turn: Turn | Exhausted
        if record.asked_ms is not None and record.choice is not None:  # another process of us was here
            turn = Turn(choice=record.choice, infra=record.infra)
        else:
            turn = self._turn(order)
        while isinstance(turn, Turn):
            choice = turn.choice
            beside = any(older.stands for older in self._leaving.left(self.name))
            failure = self._launch_in(order, turn)
            if failure is not None and beside and failure.kind in _IN_THE_WAY:
                failure = self._launch_once_alone(order, turn, failure)
            if failure is None:
                return
            with shared.lock:
                over = shared.candidates.failed(
                    self.name, choice, failure.kind, plain(str(failure)), time.monotonic()
                )
                shared.wake_waiting()
            turn = over or self._turn(order)
        self._give_up(order, turn)

    def _launch_once_alone(
        self, order: HostOrder, turn: Turn, failure: ProvisionError
    ) -> ProvisionError | None:
        """What is still going may have held the very room, or the quota, that the new one needs."""
        try:
            self._older_gone()
        except ProvisionError:
            return failure
        _log.info("launched once more, alone", host=self.name, error=plain(str(failure)))
        return self._launch_in(order, turn)

    def _turn(self, order: HostOrder) -> Turn | Exhausted:
        """What to try next; waits for what another host finds out."""

        def ask() -> Turn | Exhausted | None:
            return self._shared.candidates.next(self.name, order.attempt, time.monotonic())

        return cast("Turn | Exhausted", self._await(ask))

    def _launch_in(self, order: HostOrder, turn: Turn) -> ProvisionError | None:
        """Launch in one choice; None: it is up."""
        shared = self._shared
        if (problem := self._place(turn.choice)) is not None:
            return problem
        with shared.lock:
            shared.queue.append(self)
        try:
            self._await(lambda: shared.take_slot(self))
        except Superseded:
            shared.leave_queue(self)
            raise
        try:
            record = self._begin(order, turn)
            self._report(record, "launching")
            launched = self._again(lambda: self._ask_for(order, turn), "launch")
        except ProvisionError as error:
            return self._clean_up(order, error)
        finally:
            shared.free_slot()
        with shared.lock:
            shared.candidates.up(self.name, turn.choice, launched.infra)
            record = shared.keep(_record(order, turn, Phase.UP, launched))
            shared.wake_waiting()
        self._report(record, "launched")
        return None

    def _place(self, choice: int) -> ProvisionError | None:
        """Have the controller place groups as this choice needs it, before anything is launched; None: they are."""
        shared, backoff = self._shared, self._backoff()
        while True:
            # What a host is told comes with the controller's answer: an older order is of another place's groups.
            self._await(lambda: shared.candidates.heard or None)
            with shared.lock:
                if shared.candidates.is_placed(choice):
                    return None
                homes = shared.candidates.homes(choice)
            try:
                shared.controller.place(choice, homes)
            except PeerRefusedError as error:
                return ProvisionError(plain(str(error)), kind=Kind.REFUSED)
            except ChannelError as error:
                _log.info("groups wait to be placed", choice=choice, error=str(error))
                self._pause(backoff)
            else:
                with shared.lock:
                    shared.candidates.place(choice)

    def _ask_for(self, order: HostOrder, turn: Turn) -> Launched:
        with self._shared.lock:
            newest = self._order  # with an enrolment that was made a moment ago
            order = newest if newest is not None and newest.key == order.key else order
        if not order.enrolment:
            raise ProvisionError("the controller believes that it is up, and gives it no enrolment")
        choice = self._shared.choices[turn.choice]
        return self._shared.provider.launch(order, choice, turn, stop=self._stop)

    def _begin(self, order: HostOrder, turn: Turn) -> Record:
        """Write down what is about to be asked for, unless it was asked for already."""
        with self._shared.lock:
            record = self._shared.requests.get(self.name)
            if record is not None and record.asked_ms is not None and record.choice == turn.choice:
                return record
            # It bills from now on, by the plan until the provider has said what it really costs.
            price = planned_price(self._shared.choices[turn.choice], self.name)
            fresh = replace(_record(order, turn, Phase.LAUNCHING), usd_per_hour=price)
            if record is not None and record.asked:  # in a choice before, of which it says how that ended
                fresh = replace(fresh, kind=record.kind, left=record.left)
            return self._shared.keep(fresh)

    def _clean_up(self, order: HostOrder, error: ProvisionError) -> ProvisionError:
        """After a failed launch SkyPilot leaves what there is of the cluster, for people to look at: it costs."""
        left = self._down_within(order.cluster, _CLEAN_UP_S)
        # Written down: the kind of the failure, which says what helps, says nothing of this.
        self._shared.requests.change(
            self.name, left="" if left is None else plain(str(left)), kind=str(error.kind)
        )
        if left is None:
            return error
        text = f"{error}; what there is of {order.cluster} may still bill: {left}"
        return ProvisionError(text, kind=error.kind)

    def _give_up(self, order: HostOrder, over: Exhausted) -> None:
        """Nothing is left to try for this attempt."""
        if len(self._shared.choices) == 1:
            text = "; ".join(reason.text for reason in over.reasons)
        else:
            text = "; ".join(f"{self._name_of(one.choice)}: {one.kind}: {one.text}" for one in over.reasons)
        tried = self._shared.requests.get(self.name)
        record = Record(
            host=self.name,
            attempt=order.attempt,
            phase=Phase.FAILED,
            choice=tried.choice if tried else None,
            kind=over.kind,
            reason=text,
            left=tried.left if tried else "",
        )
        self._report(self._shared.keep(record), "failed")

    def _name_of(self, choice: int) -> str:
        values = self._shared.choices[choice]
        parts = [values.get("infra"), values.get("accelerator"), "spot" if values.get("use_spot") else None]
        return f"{choice + 1}. {' '.join(str(part) for part in parts if part)}"

    # --- down -------------------------------------------------------------------------------------

    def _take_down(self, order: HostOrder) -> None:
        shared = self._shared
        record = shared.requests.get(self.name)
        known = record or Record(host=self.name, attempt=order.attempt, phase=Phase.ENDED)
        told = replace(known, attempt=order.attempt)  # also where that attempt was never begun
        shared.gone(self.name)
        if (record is None and not shared.requests.lost) or not known.asked:
            # Nothing was asked for, or it is down already: what has this name by now is not ours.
            self._drop()
            self._await_older()
            self._report(replace(told, reason=order.reason), "down")
            return
        while (left := self._down_within(known.cluster, shared.limits.down_s)) is not None:
            if record is not None:
                shared.requests.change(self.name, left=plain(str(left)))
            self._report(replace(told, reason=f"{known.cluster} may still bill: {left}"), "down_failed")
            if self._stop.wait(shared.limits.down_again_s):
                raise Superseded
        self._drop()
        self._await_older()
        self._report(replace(told, reason=order.reason), "down")

    def _await_older(self) -> None:
        """A host is down when nothing of any attempt at it is left; who takes those down says why they do not go."""
        self._await(lambda: None if self._leaving.left(self.name) else True)

    def _down_within(self, cluster: str, limit_s: float) -> ProvisionError | None:
        return down_within(self._shared, cluster, limit_s, self._stop)

    def _drop(self) -> None:
        with self._shared.lock:
            self._shared.requests.drop(self.name, candidates=self._shared.candidates.to_json())

    # --- reports ----------------------------------------------------------------------------------

    def _report(self, record: Record, state: str) -> None:
        self._shared.tell(record, state)


def _record(order: HostOrder, turn: Turn, phase: Phase, launched: Launched | None = None) -> Record:
    return Record(
        host=order.host,
        attempt=order.attempt,
        phase=phase,
        choice=turn.choice,
        infra=turn.infra,
        place=launched.place if launched else None,
        usd_per_hour=launched.usd_per_hour if launched else None,
    )
