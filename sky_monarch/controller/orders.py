"""What the policy wants of agents: written down first, told when that is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import structlog

from sky_monarch.controller import model
from sky_monarch.controller.agents import Agents
from sky_monarch.controller.plans import Plans

__all__ = ["Orders"]

_log = structlog.get_logger()

_NAMES: dict[type, str] = {
    model.Setup: "setup",
    model.StartGroup: "start_group",
    model.StopGroup: "stop_group",
    model.EndGeneration: "end_generation",
    model.Release: "release",
    model.WhoSaves: "who_saves",
    model.Shutdown: "shutdown",
    model.Fence: "fence",
    model.Probe: "probe",
}

Order = (
    model.Setup
    | model.StartGroup
    | model.StopGroup
    | model.EndGeneration
    | model.Release
    | model.WhoSaves
    | model.Shutdown
    | model.Fence
    | model.Probe
)


class Orders:
    """The orders of one run that are not told yet.

    Args:
        plans: Builds what agents are given.
        agents: Who are told.
        fired: Injections that were carried out by now.
        leaves_first: Whether a host is to go before the run has ended.
    """

    def __init__(
        self,
        plans: Plans,
        agents: Agents,
        fired: Callable[[], Collection[int]],
        leaves_first: Callable[[str], bool],
    ) -> None:
        self._plans = plans
        self._agents = agents
        self._fired = fired
        self._leaves_first = leaves_first
        self._waiting: list[Order] = []

    @staticmethod
    def row(order: Order) -> dict[str, Any]:
        """What the journal keeps of one."""
        row: dict[str, Any] = {"event": "command", "command": _NAMES[type(order)], "host": order.host}
        row["reason"] = order.reason
        for name in ("replica", "generation", "max_restarts", "grace_s", "attempt"):
            if hasattr(order, name):
                row[name] = getattr(order, name)
        if isinstance(order, model.Probe):
            row["targets"] = [target.host for target in order.targets]
        return row

    def add(self, order: Order) -> None:
        """Keep one until it may be told."""
        # Other agents than those are told to go last of all, when everything is written down.
        if not isinstance(order, model.Shutdown) or self._leaves_first(order.host):
            self._waiting.append(order)

    def tell(self) -> None:
        """Tell all that wait."""
        orders, self._waiting = self._waiting, []
        for order in orders:
            if isinstance(order, model.Fence):
                self._agents.fence(order.host, order.attempt, order.reason)
                _log.warning("fenced", host=order.host, attempt=order.attempt, reason=order.reason)
                continue
            # Built only now: a plan holds secrets and is kept nowhere.
            command = self._plans.command(order, fired=self._fired())
            sent = self._agents.send(order.host, command)
            replica = command.get("replica")
            _log.info("told", host=order.host, command=command["type"], replica=replica, sent=sent)
