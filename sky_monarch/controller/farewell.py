"""The last that a controller does for a run that has ended: readers finish, then the agents go."""

from __future__ import annotations

import asyncio
import contextlib

from sky_monarch.controller.agents import Agents
from sky_monarch.controller.logs import LogReader
from sky_monarch.controller.model import State

__all__ = ["farewell"]

_FOLLOWERS_S = 5.0
_AFTER_SHUTDOWN_S = 10.0
_WAIT_FOR_AGENTS_S = 30.0
_AGENTS_END_S = 300.0


async def farewell(
    state: State,
    agents: Agents,
    logs: LogReader,
    *,
    taken: asyncio.Event | None = None,
    collect_s: float = 0.0,
) -> None:
    """Let readers finish and the agents go; returns when nobody needs a controller any more.

    Args:
        state: Of a run that has ended.
        agents: Who is connected.
        logs: Streams under way.
        taken: Set where whoever launched the run has taken its end: it is on this machine alone until then.
        collect_s: Longest wait for that.
    """
    if taken is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(collect_s):
                await taken.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FOLLOWERS_S):
            while logs.streams:
                await asyncio.sleep(0.02)
    # Hosts that were provisioned have been told, and are down, or nobody hears of them any more.
    waiting = {host.name for host in state.hosts if not host.lost and not host.provisioned}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WAIT_FOR_AGENTS_S):
            while waiting:
                for name in sorted(waiting):
                    reason = f"the run is {state.phase}: {state.reason}"
                    order = {"type": "shutdown", "grace_s": state.grace_s, "reason": reason}
                    if agents.connected(name) and agents.send(name, order):
                        waiting.discard(name)
                await asyncio.sleep(0.02)
    # The agent ends this process last of all; until then it still has events to store.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_AGENTS_END_S):
            while any(agents.connected(host.name) for host in state.hosts):
                await asyncio.sleep(0.1)
    await asyncio.sleep(_AFTER_SHUTDOWN_S)
