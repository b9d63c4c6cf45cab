"""Brings what is to what the controller wants: one thread a host, one that asks, one that watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from sky_monarch.errors import ChannelError
from sky_monarch.launch.cluster_plan import names_one_zone
from sky_monarch.provision.candidates import Candidates
from sky_monarch.provision.client import Backoff, ControllerClient
from sky_monarch.provision.host import Host
from sky_monarch.provision.leaving import Leaving
from sky_monarch.provision.provider import HostOrder, Provider
from sky_monarch.provision.requests import Phase, Requests
from sky_monarch.provision.settings import Settings
from sky_monarch.provision.shared import Shared
from sky_monarch.provision.watch import Watch

__all__ = ["Provisioner"]

_log = structlog.get_logger()
_CLOSE_S = 5.0
_ENDED_S = 1.0


class Provisioner:
    """The hosts of one run.

    Args:
        settings: What it is told.
        provider: Who launches.
        requests: What was asked of it.
        closing: Set, from a signal handler or another thread, where it is to end: clusters stay as they are then, and
            so do requests that are under way.
        reach: Opens the way to a head that is a cluster.

    Attributes:
        over: Set where the controller says that the run has ended.
        head_gone: Why the head, which is a cluster, is not there any more; None while nobody says so.
    """

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        requests: Requests,
        closing: threading.Event | None = None,
        *,
        reach: Callable[[], None] | None = None,
    ) -> None:
        self.closing = closing or threading.Event()
        self.over = threading.Event()
        self.head_gone: str | None = None
        self._settings = settings
        self._head = None if settings.head is None else settings.head.cluster
        self._shared = Shared(
            provider=provider,
            controller=ControllerClient(settings.api, settings.token, self.closing, reach),
            requests=requests,
            candidates=_candidates(settings, requests),
            choices=settings.choices,
            limits=settings.limits,
            closing=self.closing,
        )
        self._leaving = Leaving(self._shared)
        self._hosts: dict[str, Host] = {}
        self._early: dict[str, tuple[int, str]] = {}
        self._watch = Watch(provider, settings.limits, self._up, self._ended)
        self._watching = threading.Thread(target=self._look, name="watch", daemon=True)

    @property
    def failed(self) -> bool:
        """Whether a defect of ours ended it."""
        return self._shared.defect.is_set()

    @property
    def controller(self) -> ControllerClient:
        """Whom it asks and reports to."""
        return self._shared.controller

    def run(self) -> None:
        """Work until it is closed."""
        try:
            self._watching.start()
            self._leaving.start()
            self._follow()
        except BaseException:
            self._shared.fail()
            raise

    def _follow(self) -> None:
        controller, limits = self._shared.controller, self._settings.limits
        backoff = Backoff(0.1, 5.0)
        version = -1
        while not self.closing.is_set():
            with self._shared.lock:
                placings = self._shared.candidates.placings
            try:
                wanted = controller.wanted(version, limits.wait_s)
            except ChannelError as error:
                if version >= 0:
                    _log.info("the controller is away", error=str(error))
                # One that starts anew may count from the beginning: ask for all there is.
                version = -1
                self._doubt_the_head()
                self.closing.wait(backoff.delay_s())
                continue
            backoff.reset()
            version = wanted.version
            # One answer counts as a whole, and whoever is wanted in it takes part in one round.
            with self._shared.lock:
                self._shared.candidates.placed(wanted.placement, placings=placings)
                for order in wanted.orders:
                    if order.want == "up":
                        self._shared.candidates.join(order.host, order.attempt, time.monotonic())
                for order in wanted.orders:
                    self._want(order)
                self._shared.wake_waiting()
            doubted = {order.host: order.attempt for order in wanted.orders if order.doubted}
            self._watch.doubt(doubted)
            if wanted.ended:  # an answer that comes at once, each time
                self.over.set()
                self.closing.wait(_ENDED_S)
            # Of another process of us, and not wanted any more: nobody would hear what it finds.
            if (scout := self._shared.candidates.scout) is not None and scout not in self._hosts:
                self._shared.gone(scout)

    def _doubt_the_head(self) -> None:
        """It does not answer: whether it is there at all is asked out of turn. Hosts' lines nobody hears of now."""
        record = None if self._head is None else self._shared.requests.get(self._head)
        if record is not None:
            self._watch.doubt({record.host: record.attempt})

    def finish(self, *, close: bool = True) -> bool:
        """Wait for the threads, within a limit: they may be in the middle of a question to a provider.

        Args:
            close: Also let go of the provider.

        Returns:
            Whether all have ended.
        """
        deadline = time.monotonic() + _CLOSE_S
        for host in self._hosts.values():
            host.close(0.0)
        left = [
            host.name
            for host in self._hosts.values()
            if not host.close(max(0.0, deadline - time.monotonic()))
        ]
        if self._watching.ident is not None:
            self._watching.join(max(0.0, deadline - time.monotonic()))
        if not self._leaving.finish(deadline):
            left.append("clusters that go")
        if left:
            _log.info("left in the middle of something", hosts=left)
        elif close:
            self._shared.controller.close()
            self._shared.provider.close()
        return not left

    def _want(self, order: HostOrder) -> None:
        host = self._hosts.get(order.host)
        if host is None:
            host = Host(order.host, self._shared, self._leaving)
            with self._shared.lock:
                self._hosts = {**self._hosts, order.host: host}  # the watch looks at it from its own thread
                early = self._early.pop(order.host, None)
            if early is not None:
                host.ended(*early)
        host.want(order)

    def _up(self) -> dict[str, int]:
        """Which hosts are up, and their attempts."""
        found = {}
        for name in filter(None, (*self._hosts, self._head)):
            record = self._shared.requests.get(name)
            if record is not None and record.phase is Phase.UP:
                found[name] = record.attempt
        return found

    def _ended(self, name: str, attempt: int, reason: str) -> None:
        if name == self._head:
            record = self._shared.requests.get(name)
            if record is not None and attempt in (0, record.attempt):  # not of the one that this one follows
                self.head_gone = self.head_gone or reason
            return
        with self._shared.lock:
            host = self._hosts.get(name)
            if host is None:  # nobody has said yet that it is wanted
                self._early[name] = (attempt, reason)
                return
        host.ended(attempt, reason)

    def _look(self) -> None:
        try:
            self._watch.run(self.closing)
        except BaseException:
            self._shared.fail()
            raise


def _candidates(settings: Settings, requests: Requests) -> Candidates:
    """The choices, as another process of us left them."""
    follow = [
        settings.same_zone
        and settings.provider != "local"
        and len(choice.get("hosts") or ()) > 1
        and not names_one_zone(str(choice.get("infra") or "local"))
        for choice in settings.choices
    ]
    homes = [
        {str(host["cluster"]): host["groups"] for host in choice.get("hosts") or ()}
        for choice in settings.choices
    ]
    hold_s = settings.limits.hold_s
    candidates = Candidates(len(settings.choices), follow=follow, homes=homes, hold_s=hold_s)
    if requests.candidates:
        candidates.restore(requests.candidates)
    for host in candidates.hosts_up:
        record = requests.get(host)
        if record is None or record.phase is not Phase.UP:
            candidates.gone(host)
    return candidates
