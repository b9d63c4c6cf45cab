"""The controller's side of those who provision: who asks what is wanted, what they report, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sky_monarch.controller.enrolment import Enrolments, Issuer
from sky_monarch.controller.host_reports import check_head_bill, check_host_report, check_placement
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.moving import why_not_placed
from sky_monarch.controller.phases import HostPhase
from sky_monarch.controller.settings import Settings
from sky_monarch.errors import ConfigError

__all__ = ["Provisioning"]

_SILENT_S = 15.0
_LOOK_S = 1.0
_SHORTEST_S, _LONGEST_S = 0.05, 5.0


class Provisioning:
    """Serves launchers and watches the budget. Lives in the controller's event loop.

    Args:
        settings: What the controller was told.
        issuer: The authority of the run, where it has one.
        memory: What the controller remembers now.
        record: Journals one row of ours and does what follows.
        news: Waits until something has happened, for so many seconds at the most.
        guarded: Makes a callback end the process where it fails.

    Attributes:
        taken: Set where whoever launched the run has taken its end.
    """

    def __init__(
        self,
        settings: Settings,
        issuer: Issuer | None,
        *,
        memory: Callable[[], Memory],
        record: Callable[[dict[str, Any]], None],
        news: Callable[[float], Awaitable[None]],
        guarded: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._settings = settings
        self._enrolments = Enrolments(settings, issuer)
        self._memory = memory
        self._record = record
        self._news = news
        self._guarded = guarded
        self._budget = settings.budget
        self._polls = 0
        self._silence: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self.taken = asyncio.Event()

    def start(self) -> None:
        """Begin to wait for launchers, and to watch the budget."""
        if self._memory().state.provisions:
            self._await_launcher()
        self._watch_budget()

    def close(self) -> None:
        """Let go of everything."""
        self._closed = True
        for timer in (self._silence, self._watch):
            if timer is not None:
                timer.cancel()

    # --- launchers -------------------------------------------------------------------------------------------

    async def wanted(self, after: int, wait_s: float, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """What is wanted, once it is another version than ``after``, or after ``wait_s``.

        Args:
            after: The version that the launcher knows. Any other counts: a journal that was lost counts anew.
            wait_s: Longest wait.
            gone: Whether whoever asked has left.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        self._polls += 1
        try:
            self._launcher_came()
            while self._memory().state.wanted == after and not self._memory().state.phase.ended:
                left_s = deadline_s - loop.time()
                if left_s <= 0 or await gone():
                    break
                await self._news(min(left_s, _LOOK_S))
            return self._enrolments.document(self._memory().state)
        finally:
            self._polls -= 1
            if not self._polls:
                self._await_launcher()

    def _launcher_came(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        state = self._memory().state
        if state.provisions and state.launcher is not True and not state.phase.ended:
            self._record({"event": "launcher_came"})

    def _await_launcher(self) -> None:
        if self._closed:
            return
        if self._silence is not None:
            self._silence.cancel()
        act = self._guarded(self._launcher_silent)
        self._silence = asyncio.get_running_loop().call_later(_SILENT_S, act)

    def _launcher_silent(self) -> None:
        state = self._memory().state
        if state.provisions and state.launcher is not False and not state.phase.ended and not self._polls:
            self._record({"event": "launcher_gone", "silent_s": _SILENT_S})

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a launcher says of a host; said twice, it was said once.

        Returns:
            Where the host stands.

        Raises:
            ConfigError: It is not what the API allows.
            RunNotFoundError: There is no such host.
        """
        memory = self._memory()
        attempts = {host.name: host.attempt for host in memory.state.hosts if host.provisioned}
        row = check_host_report(report, attempts, choices=self._settings.choices)
        if not memory.state.phase.ended and not memory.money.repeats(row):
            self._record(row)
            self._watch_budget()  # another price, another moment
        host = memory.state.host(row["host"])
        return {"host": host.name, "attempt": host.attempt, "phase": str(host.phase)}

    def place(self, order: Mapping[str, Any]) -> None:
        """Place groups as the place needs that a launcher is about to try; said twice, it was said once.

        Raises:
            ConfigError: It is not what the API allows, or it is too late for that.
        """
        state = self._memory().state
        row = check_placement(order, replicas=len(state.groups), choices=self._settings.choices)
        if row["choice"] == state.placement:
            return
        if (problem := why_not_placed(state)) is not None:
            raise ConfigError(f"groups cannot be placed anew: {problem}")
        taken = [host.name for host in state.hosts if not host.provisioned and host.name in row["homes"]]
        if taken:
            raise ConfigError(f"host {taken[0]} is not provisioned")
        self._record(row)

    def head(self, bill: Mapping[str, Any]) -> None:
        """Take since when the head bills, and how much; said twice, it was said once.

        Raises:
            ConfigError: It is not what the API allows, or this head is no cluster.
        """
        row = check_head_bill(bill)
        if not self._settings.collect_s:
            raise ConfigError("the head of this run is the machine that launched it")
        memory = self._memory()
        if memory.money.head is None and not memory.state.phase.ended:
            self._record(row)
            self._watch_budget()

    def take(self) -> None:
        """Whoever launched the run has taken its end: nobody need wait for that."""
        self.taken.set()

    def missing(self) -> str | None:
        """What to do where nobody provisions; None where that is not so, or the head's agent starts one."""
        state = self._memory().state
        if not self._settings.collect_s or state.launcher is not False or state.phase.ended:
            return None
        name = self._settings.name
        return f"no launcher is connected; `sky-monarch attach {name}` starts one, on the machine that launched the run"

    # --- what people see -------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What the status of the run says of its hosts and their cost."""
        now = time.monotonic_ns(), time.time_ns() // 1_000_000
        memory = self._memory()
        head = memory.money.head
        heads = [] if head is None else [self._head_line(head, now)]
        hosts = [
            {
                "host": host.name,
                "groups": list(host.replicas),
                "spare": host.spare and host.phase is not HostPhase.DOWN,
                "head": False,
                "attempt": host.attempt,
                "phase": str(host.phase),
                "reason": host.reason,
                "gone": host.gone and host.replaces is None,
                "since_ms": memory.since_ms.get(host.name, self._settings.created_ms),
                "stops_in_s": memory.notices.left_s(host.name, *now) if host.leaving else None,
                **memory.money.document(host.name, *now),
            }
            for host in memory.state.hosts
            if host.provisioned
        ]
        state = memory.state
        over = state.outcome is not None or state.phase.ended
        stops_in_s = None if over else self._budget.due_s(memory.money, *now)
        return {"hosts": [*hosts, *heads], **memory.money.totals(*now), "stops_in_s": stops_in_s}

    def _head_line(self, name: str, now: tuple[int, int]) -> dict[str, Any]:
        """The head, where it is a cluster of its own: it costs as hosts do."""
        return {
            "host": name,
            "groups": [],
            "spare": False,
            "head": True,
            "attempt": 1 if (told := self._settings.succeeds) is None else told["attempt"],
            "phase": str(HostPhase.UP),
            "reason": None,
            "gone": False,
            "since_ms": self._settings.created_ms,
            "stops_in_s": None,
            **self._memory().money.document(name, *now),
        }

    # --- the budget ------------------------------------------------------------------------------------------

    def _watch_budget(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        state, now = self._memory().state, (time.monotonic_ns(), time.time_ns() // 1_000_000)
        if self._budget.unlimited or self._closed or state.outcome is not None or state.phase.ended:
            return
        money = self._memory().money
        if (reason := self._budget.spent(money, *now)) is not None:
            self._record({"event": "budget_spent", "reason": reason})
            return
        due_s = self._budget.due_s(money, *now)
        delay_s = _LONGEST_S if due_s is None else min(max(due_s, _SHORTEST_S), _LONGEST_S)
        act = self._guarded(self._watch_budget)
        self._watch = asyncio.get_running_loop().call_later(delay_s, act)
