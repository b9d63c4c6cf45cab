"""What the hosts of a run share: provider, controller, choices, and the slots in which launches run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from sky_monarch.provision.candidates import Candidates
from sky_monarch.provision.client import ControllerClient
from sky_monarch.provision.provider import Provider
from sky_monarch.provision.requests import Record, Requests
from sky_monarch.provision.settings import Limits

__all__ = ["Shared", "Waiter"]

_log = structlog.get_logger()


class Waiter(Protocol):
    """Who waits for a turn or a slot."""

    def wake(self) -> None:
        """Look again. The lock is held."""
        ...


@dataclass(slots=True)
class Shared:
    """What is not safe to use from any thread is used under ``lock`` only.

    Attributes:
        closing: This process ends: waits are given up, clusters stay as they are.
        defect: It ends because one of its threads failed by a defect of ours.
        waiting: Who waits for a turn or a slot.
        queue: Those who wait for a slot, in order.
        launching: Slots that are taken.
    """

    provider: Provider
    controller: ControllerClient
    requests: Requests
    candidates: Candidates
    choices: tuple[Mapping[str, Any], ...]
    limits: Limits
    closing: threading.Event
    defect: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    waiting: set[Waiter] = field(default_factory=set)
    queue: deque[Waiter] = field(default_factory=deque)
    launching: int = 0

    def keep(self, record: Record) -> Record:
        """Write down a record, and what is known of the choices with it."""
        with self.lock:
            return self.requests.put(record, candidates=self.candidates.to_json())

    def gone(self, host: str) -> None:
        """A host is not up any more, or does not try any more: somebody else may have to."""
        with self.lock:
            self.candidates.gone(host)
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """What is known of the choices has changed."""
        with self.lock:
            for waiter in self.waiting:
                waiter.wake()

    def take_slot(self, waiter: Waiter) -> bool | None:
        """Take the slot of a launch if it is this one's turn: who came first is first. None: it is not."""
        if self.launching < self.limits.launches and self.queue and self.queue[0] is waiter:
            self.queue.popleft()
            self.launching += 1
            self._next_slot()
            return True
        return None

    def leave_queue(self, waiter: Waiter) -> None:
        """It does not wait for a slot any more."""
        with self.lock:
            if waiter in self.queue:
                self.queue.remove(waiter)
            self._next_slot()

    def free_slot(self) -> None:
        """Give a slot back, to whoever has waited longest."""
        with self.lock:
            self.launching -= 1
            self._next_slot()

    def _next_slot(self) -> None:
        if self.queue and self.launching < self.limits.launches:
            self.queue[0].wake()

    def tell(self, record: Record, state: str) -> None:
        """Report what became of an attempt; returns once the controller has it, or this process ends."""
        failed = state in ("failed", "launching")  # of a launch: in the choice before
        kind = record.kind if failed else None
        reason = record.reason or None
        _log.info("host", host=record.host, attempt=record.attempt, state=state, kind=kind, reason=reason)
        self.controller.report(
            {
                "host": record.host,
                "attempt": record.attempt,
                "state": state,
                "kind": kind,
                "reason": reason,
                "left": failed and bool(record.left),
                "choice": record.choice,
                "place": record.place,
                "usd_per_hour": record.usd_per_hour,
            }
        )

    def fail(self) -> None:
        """A thread failed by a defect: this process ends, and its agent starts another one."""
        self.defect.set()
        self.closing.set()
