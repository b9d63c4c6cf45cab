"""The launcher of a run whose head is a cluster: the one process of it on the machine of whoever has credentials.

It brings the head up, then asks it which hosts are wanted, as any provisioner does. It may be away at any time: the run
trains on meanwhile. A head that is lost is had again, where the job has a checkpoint to go on from: its hosts are
taken down first, so that there are never two runs. And it ends the run: in order where the head can be asked, from
outside where it cannot; the head goes last, after what is to be kept of the run has been brought here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from sky_monarch.errors import ChannelError, ConfigError
from sky_monarch.launch.away import EndOrder, end_order
from sky_monarch.launch.door import Door, close_door, open_door
from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.head import Away, following
from sky_monarch.launch.placement import cluster_name
from sky_monarch.provision.archive import Ended, keep_events, keep_output, last_event, write_final
from sky_monarch.provision.classify import plain
from sky_monarch.provision.client import Backoff, ControllerClient
from sky_monarch.provision.head import Head, pinned
from sky_monarch.provision.provider import Kind, Provider, ProvisionError, Superseded
from sky_monarch.provision.provisioner import Provisioner
from sky_monarch.provision.requests import Phase, Record, Requests
from sky_monarch.provision.settings import Settings
from sky_monarch.provision.succession import Succession, is_over, last_attempts, succession

__all__ = ["Launcher"]

_log = structlog.get_logger()
_LOOK_S = 0.2
_STATUS_S = 5.0
_CLOSE_S = 2.0
_AT_ONCE = 8
_NO_CAPACITY, _FAILED, _CANCELLED = 3, 1, 8


class Launcher:
    """One run, from its head's launch to its end.

    Args:
        settings: What it is told.
        away: What the head is to be.
        provider: Who launches.
        requests: What was asked of it.
        closing: Set where this process ends, or is to: everything stays as it is then.
    """

    def __init__(
        self,
        settings: Settings,
        away: Away,
        provider: Provider,
        requests: Requests,
        closing: threading.Event,
    ) -> None:
        self.closing = closing
        self.failed = False
        self._settings = settings
        self._provider = provider
        self._requests = requests
        self._folder = RunFolder(settings.run_dir)
        self._away = away
        self._succession = Succession.of(settings.run_dir)
        self._head = self._next_head()
        self._interrupt = threading.Event()  # the head's launch is not wanted any more
        self._status: dict[str, Any] = {}
        self._status_s = 0.0
        self._status_ms = 0
        self._order: EndOrder | None = None
        self._is_unrecorded = requests.lost  # nobody knows what was asked for

    def run(self) -> None:
        """Work until the run has ended, or this process does."""
        listening = threading.Thread(target=self._listen, name="orders", daemon=True)
        listening.start()
        try:
            self._work()
        except Superseded:
            pass
        except BaseException:
            self.failed = True
            raise
        finally:
            self.closing.set()

    def finish(self) -> None:
        """Nothing is waited for: hosts, head and requests go on without this process."""
        self._provider.close()

    def _listen(self) -> None:
        while not self.closing.wait(_LOOK_S):
            if self._order is None and (order := end_order(self._settings.run_dir)) is not None:
                self._order = order
                self._interrupt.set()
        self._interrupt.set()

    # --- from the head's launch on --------------------------------------------------------------------------

    def _next_head(self) -> Head:
        settings, after = self._settings, self._succession
        away, attempt = self._away, 1
        if after is not None:
            away, attempt = following(away, after.told), after.attempt
        return Head(away, self._provider, self._requests, settings.choices, settings.limits, attempt=attempt)

    def _work(self) -> None:
        while True:
            if self._succession is not None and not self._succession.cleared and not self._clear():
                return
            if not self._serve():
                return

    def _serve(self) -> bool:
        """From the launch of a head to its end; whether another one is to follow."""
        try:
            is_known = Door.of(self._folder) is not None
            if is_known and self._head.record is None:
                self._is_unrecorded = True
            record = self._bring_up(is_known=is_known)
            if record.phase is Phase.UP and not is_known:
                self._head.find(self._interrupt).keep(self._folder)
        except Superseded:
            if self.closing.is_set() or self._order is None:
                raise
            self._end_from_outside(Ended("CANCELLED", self._order.reason, _CANCELLED))
            return False
        except ProvisionError as error:
            code = _NO_CAPACITY if error.kind is Kind.CAPACITY else _FAILED
            reason = f"the head was not launched: {plain(str(error))}"
            if error.hint:
                reason += f" ({error.hint})"
            if self._succession is not None:
                reason += f"; {self._next}"
            self._end_from_outside(Ended("FAILED", reason, code))
            return False
        if record.phase is not Phase.UP:
            return self._lost(record.reason)
        return self._follow(record.infra)

    def _bring_up(self, *, is_known: bool) -> Record:
        """Launch the head; one that follows another is waited for, as hosts are: no host is there that bills."""
        limits = self._settings.limits
        backoff = Backoff(limits.head_again_s, limits.head_again_max_s)
        deadline = time.monotonic() + limits.head_within_s
        while True:
            try:
                return self._head.bring_up(self._interrupt, is_known=is_known)
            except ProvisionError as error:
                may_come = error.kind in (Kind.CAPACITY, Kind.ERROR)
                if self._succession is None or not may_come or time.monotonic() > deadline:
                    raise
                _log.warning("the next head is waited for", error=plain(str(error)))
            if self._interrupt.wait(backoff.delay_s()):
                raise Superseded

    def _follow(self, infra: str | None) -> bool:
        settings = self._settings
        if settings.same_zone:
            settings = dataclasses.replace(settings, choices=pinned(settings.choices, infra))
        own = threading.Event()  # the provisioner's end is not ours
        provisioner = Provisioner(
            settings, self._provider, self._requests, own, reach=lambda: open_door(self._folder)
        )
        working = threading.Thread(target=self._provision, args=(provisioner,), name="provision", daemon=True)
        working.start()
        try:
            act = self._watch(provisioner)
        finally:
            own.set()
            finished = provisioner.finish(close=False)
        try:
            again = act is not None and bool(act())
            if again and not finished and not provisioner.finish(close=False):
                # Who is in the middle of a question could still note hosts as up: the next process of us goes on.
                _log.error("threads of the lost head's hosts do not end")
                self.failed = True
                return False
            return again
        finally:
            working.join(_CLOSE_S)
            if not working.is_alive():  # else it is in the middle of a question, which this process ends
                provisioner.controller.close()

    def _provision(self, provisioner: Provisioner) -> None:
        try:
            provisioner.run()
        except BaseException:
            self.failed = True
            self.closing.set()
            raise

    def _watch(self, provisioner: Provisioner) -> Any:
        """Wait for what ends the run; returns what is to be done then, None where this process ends."""
        controller = provisioner.controller
        asked = False
        since_s: float | None = None
        while not self.closing.wait(_LOOK_S):
            if provisioner.failed:
                self.failed = True
                return None
            if provisioner.head_gone is None:  # else a minute may pass until the way to it is given up
                self._note(controller)
            if provisioner.over.is_set():
                self._await_hosts()
                return lambda: self._collect(controller)
            if (reason := provisioner.head_gone) is not None:
                return lambda: self._lost(reason)
            if (order := self._order) is None:
                continue
            since_s = since_s if since_s is not None else time.monotonic()
            asked = asked or self._ask(controller, order)
            limits = self._settings.limits
            if time.monotonic() - since_s > (limits.end_s + order.grace_s if asked else limits.unreached_s):
                why = "did not end it in time" if asked else "did not answer"
                text = f"{order.reason}; its head, {self._head.name}, {why}, and it was ended from outside"
                return lambda: self._end_from_outside(Ended("CANCELLED", text, _CANCELLED))
        return None

    def _ask(self, controller: ControllerClient, order: EndOrder) -> bool:
        try:
            controller.end(grace_s=order.grace_s, reason=order.reason)
        except ChannelError as error:
            _log.info("the head does not take the order to end", error=plain(str(error)))
            return False
        return True

    def _note(self, controller: ControllerClient) -> None:
        """Remember what the head says of the run: the last word of one that dies."""
        if time.monotonic() - self._status_s < _STATUS_S:
            return
        try:
            self._status = controller.status()
            self._status_ms = time.time_ns() // 1_000_000
            keep_events(controller, self._settings.run_dir)
            bill = self._head.bill()
            if bill is not None and not any(host.get("head") for host in self._status.get("hosts") or ()):
                controller.head(bill)  # also again, where the controller has lost its journal
        except ChannelError as error:
            _log.debug("the head does not answer", error=plain(str(error)))
        finally:
            self._status_s = time.monotonic()

    # --- the end --------------------------------------------------------------------------------------------

    def _await_hosts(self) -> None:
        """Of a run that has ended while nobody was here hosts may still stand: the provisioner takes them down."""
        deadline = time.monotonic() + self._settings.limits.down_s
        while self._left() and time.monotonic() < deadline:
            if self.closing.wait(_LOOK_S):
                raise Superseded

    def _left(self) -> list[str]:
        """Hosts of which something may be left."""
        return [name for name in self._hosts() if self._recorded(name)]

    def _recorded(self, host: str) -> list[str]:
        """Clusters that were asked for and may be there: of the newest attempt at a host, and of older ones."""
        records = (self._requests.get(host), *self._requests.older(host))
        return [record.cluster for record in records if record is not None and record.asked]

    def _clusters(self, host: str) -> list[str]:
        """The same, where there is a record of what was asked for; else what the provider knows."""
        clusters = dict.fromkeys(self._recorded(host))
        if self._is_unrecorded:
            clusters |= {cluster_name(host, 1): None}
            with contextlib.suppress(ProvisionError):
                clusters |= dict.fromkeys(self._provider.found(host))
        return list(clusters)

    def _hosts(self) -> list[str]:
        """All of the plan, and those that the run was scaled to."""
        found: dict[str, None] = {}
        for choice in self._settings.choices:
            found |= {str(host["cluster"]): None for host in choice.get("hosts") or ()}
        found |= {str(host["host"]): None for host in self._status.get("hosts") or ()}
        found |= dict.fromkeys(self._requests.hosts())
        found.pop(self._head.name, None)
        return list(found)

    def _collect(self, controller: ControllerClient) -> None:
        """Take what is to be kept, then take the head down: the run has ended in order."""
        backoff = Backoff(0.1, 5.0)
        deadline = time.monotonic() + self._settings.limits.head_s
        while True:
            try:
                status = controller.status()
                keep_events(controller, self._settings.run_dir)
                limit_s, stop = self._settings.limits.output_s, self.closing
                self._status = keep_output(
                    controller, self._settings.run_dir, status, limit_s=limit_s, stop=stop
                )
                if stop.is_set():
                    raise Superseded  # the next process of us brings the rest
                controller.collected()
                break
            except ChannelError as error:
                _log.info("the end of the run cannot be asked for", error=plain(str(error)))
                if time.monotonic() > deadline:
                    text = f"its head, {self._head.name}, does not say how it ended"
                    self._end_from_outside(Ended("FAILED", text, _FAILED))
                    return
            if self.closing.wait(backoff.delay_s()):
                raise Superseded
        hosts = dict.fromkeys(self._left(), "it was not taken down in time")
        self._conclude({name: hosts.get(name) for name in self._hosts()}, None)

    def _lost(self, reason: str) -> bool:
        """The head is gone, and with it lighthouse, controller and journal: the hosts have nobody to dial.

        Returns:
            Whether another one is to follow.
        """
        self._head.gone(reason)
        step = self._status.get("step")
        stood = "" if step is None else f"; the last step that it told was {step}"
        text = f"its head, {self._head.cluster}, is gone ({reason})"
        if (order := self._order) is None and (why_not := self._succeed(text)) is None:
            return True
        text += f", so its hosts were taken down{stood}"
        if order is not None:
            self._end_from_outside(Ended("CANCELLED", f"{order.reason}; {text}; {self._next}", _CANCELLED))
        else:
            self._end_from_outside(Ended("FAILED", f"{text}; {why_not}{self._next}", _FAILED))
        return False

    def _succeed(self, reason: str) -> str | None:
        """Note that another head follows; why none does, as the beginning of a sentence."""
        settings, before = self._settings, self._succession
        if settings.checkpoint is None or self._is_unrecorded:
            return ""
        if not self._status or is_over(self._status):
            return ""  # nobody here knows how the run stood, or it was about to end
        records = [self._requests.get(host) for host in self._requests.hosts()]
        known = (*filter(None, records), *self._requests.older())
        after = succession(
            before,
            self._status,
            reason=reason,
            noted_ms=self._status_ms or time.time_ns() // 1_000_000,
            last_event=last_event(settings.run_dir),
            attempts=last_attempts(one for one in known if one.host != self._head.name),
        )
        if after.hopeless:
            return f"{after.fruitless + 1} heads in a row were lost without a step that is new; "
        try:
            following(self._away, after.told).check()
            self._succession = after.keep(settings.run_dir)
        except (ConfigError, OSError) as error:
            return f"no other head can follow ({plain(str(error))}); "
        _log.warning("the head is lost, and had again", reason=reason, step=after.step)
        return None

    def _clear(self) -> bool:
        """Take down all that a lost head had, so that nothing of it trains, saves or bills beside the next one.

        Returns:
            Whether nothing of it is left; else the run has ended.
        """
        assert self._succession is not None  # noqa: S101  (what the caller has just looked at)
        close_door(self._folder)
        self._folder.door.unlink(missing_ok=True)  # from here on the run is being launched, for whoever looks
        left: dict[str, str | None] = dict.fromkeys(self._hosts())
        names = self._left()
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="down") as pool:
            left |= dict(zip(names, pool.map(self._take_down, names), strict=True))
        head = Head(
            self._away,
            self._provider,
            self._requests,
            self._settings.choices,
            self._settings.limits,
            attempt=self._succession.attempt - 1,
        )
        left |= {head.name: head.take_down(self.closing)}
        if self.closing.is_set():
            raise Superseded
        standing = [name for name, why in left.items() if why is not None]
        if standing:
            names_ = ", ".join(standing)
            text = f"{self._succession.reason}, and could not be had again beside what is left: {names_}"
            self._head = head
            self._conclude(
                {name: why for name, why in left.items() if name != head.name}, Ended("FAILED", text, _FAILED)
            )
            return False
        for name in left:
            for older in self._requests.older(name):
                self._requests.forget(older)
            self._requests.drop(name, candidates=self._requests.candidates)
        self._succession = self._succession.after_clearing().keep(self._settings.run_dir)
        self._head = self._next_head()
        return True

    @property
    def _next(self) -> str:
        """What to do after a head was lost."""
        again = "`sky-monarch up` of the same job file starts it again"
        if (to := self._settings.checkpoint) is not None:
            return f"{again}, from its newest checkpoint in {to}"
        return f"{again}, from the beginning: the job has no checkpoint"

    def _end_from_outside(self, ended: Ended) -> None:
        """Take down all that was ever asked for."""
        names = self._hosts() if self._is_unrecorded else self._left()
        left: dict[str, str | None] = dict.fromkeys(self._hosts())
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="down") as pool:
            left |= dict(zip(names, pool.map(self._take_down, names), strict=True))
        self._conclude(left, ended)

    def _take_down(self, host: str) -> str | None:
        """Take down whatever there is of a host; why something may still be there, None where nothing is."""
        left = (self._take_cluster_down(cluster) for cluster in self._clusters(host))
        return "; ".join(filter(None, left)) or None

    def _take_cluster_down(self, name: str) -> str | None:
        limits = self._settings.limits
        deadline = time.monotonic() + limits.down_s
        backoff = Backoff(limits.backoff_s, limits.backoff_max_s)
        while True:
            try:
                self._provider.down(name, stop=self.closing)
                return None
            except ProvisionError as error:
                text = plain(str(error))
                if time.monotonic() > deadline or error.kind is Kind.CREDENTIALS:
                    return text
            if self.closing.wait(backoff.delay_s()):
                raise Superseded

    def _conclude(self, hosts: dict[str, str | None], ended: Ended | None) -> None:
        record, bill = self._head.record, self._head.bill()
        head = None if record is None else self._head.take_down(self.closing)
        if self.closing.is_set():
            raise Superseded
        close_door(self._folder)
        for name, left in hosts.items():
            if left is None and self._requests.get(name) is not None:
                self._requests.drop(name, candidates=self._requests.candidates)
            for older in self._requests.older(name) if left is None else ():
                self._requests.forget(older)
        left_over = {**hosts, self._head.name: head}
        write_final(self._settings.run_dir, self._status, left_over, ended, bill=bill)
        _log.info("the run has ended", left=[name for name, why in {**hosts, "head": head}.items() if why])
