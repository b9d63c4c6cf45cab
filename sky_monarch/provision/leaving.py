"""Clusters of older attempts, which go beside whatever is launched in their place.

What is to go is written down before anything else happens, so that a provisioner that is killed meanwhile goes on with
it when it starts again. It is tried until it is told that it is gone, however long that takes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import structlog

from sky_monarch.provision.classify import plain
from sky_monarch.provision.client import Backoff
from sky_monarch.provision.provider import Kind, ProvisionError, Superseded
from sky_monarch.provision.requests import Record
from sky_monarch.provision.shared import Shared

__all__ = ["Leaving", "down_within"]

_log = structlog.get_logger()


def down_within(shared: Shared, cluster: str, limit_s: float, stop: threading.Event) -> ProvisionError | None:
    """Take a cluster down; what was said last, where it may still be there after ``limit_s``.

    Raises:
        Superseded: ``stop`` was set, or this process ends.
    """
    deadline = time.monotonic() + limit_s
    backoff = Backoff(shared.limits.backoff_s, shared.limits.backoff_max_s)
    while True:
        try:
            shared.provider.down(cluster, stop=stop)
            return None
        except ProvisionError as error:
            _log.warning("a cluster does not go", cluster=cluster, error=plain(str(error)))
            if time.monotonic() > deadline or error.kind is Kind.CREDENTIALS:
                return ProvisionError(plain(str(error)), kind=error.kind)
        if stop.wait(backoff.delay_s()) or shared.closing.is_set():
            raise Superseded


class Leaving:
    """Takes them down, a thread each.

    Args:
        shared: What the hosts of the run share.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._threads: dict[str, threading.Thread] = {}
        self._trouble: dict[str, ProvisionError] = {}

    def start(self) -> None:
        """Go on with what another process of us had begun."""
        for record in self._shared.requests.older():
            self._begin(record)

    def retire(self, record: Record) -> None:
        """What there is of this attempt goes from now on; another one may take its name's place."""
        self._shared.requests.retire(record, candidates=self._shared.candidates.to_json())
        self._begin(record)

    def left(self, host: str) -> tuple[Record, ...]:
        """Attempts at a host of which a cluster may be left, beside the newest."""
        return self._shared.requests.older(host)

    def trouble(self, host: str) -> ProvisionError | None:
        """Why one of them has not gone for longer than it may take; None where none is that late."""
        with self._shared.lock:
            return next(filter(None, (self._trouble.get(one.cluster) for one in self.left(host))), None)

    def finish(self, deadline_s: float) -> bool:
        """Wait until this moment of the monotonic clock for the threads; whether all have ended."""
        for thread in self._threads.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads.values())

    def _begin(self, record: Record) -> None:
        with self._shared.lock:
            known = self._threads.get(record.cluster)
            if known is not None and known.is_alive():
                return
            thread = threading.Thread(
                target=self._run, args=(record,), name=f"{record.cluster} goes", daemon=True
            )
            self._threads[record.cluster] = thread
            thread.start()

    def _run(self, record: Record) -> None:
        try:
            self._go(record)
        except Superseded:
            return  # this process ends, and the next one goes on with it
        except BaseException:
            self._shared.fail()
            raise

    def _go(self, record: Record) -> None:
        shared, closing = self._shared, self._shared.closing
        _log.info("an older attempt goes", host=record.host, attempt=record.attempt, cluster=record.cluster)
        while (left := down_within(shared, record.cluster, shared.limits.down_s, closing)) is not None:
            with shared.lock:
                self._trouble[record.cluster] = left
                shared.wake_waiting()
            shared.tell(replace(record, reason=f"{record.cluster} may still bill: {left}"), "down_failed")
            if closing.wait(shared.limits.down_again_s):
                return
        with shared.lock:
            self._trouble.pop(record.cluster, None)
            self._threads.pop(record.cluster, None)
        if record.stands:  # it has ended only now, and costs no more
            shared.tell(replace(record, reason=""), "down")
        with shared.lock:  # told before it is forgotten: twice is fine, never is not
            shared.requests.forget(record)
            shared.wake_waiting()
