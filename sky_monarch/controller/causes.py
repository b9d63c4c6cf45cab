"""Says in one sentence how a process ended and why a generation is over."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

__all__ = ["describe_cause", "describe_exit", "exit_failed"]


def describe_exit(exit_: Mapping[str, Any], *, oom: bool = False) -> str:
    """The words for an ``Exit`` of the protocol: ``{"code": 7}`` or ``{"signal": 9}``.

    >>> describe_exit({"code": 7})
    'exited with code 7'
    >>> describe_exit({"signal": 9}, oom=True)
    'was killed by SIGKILL, out of memory'
    """
    if "signal" in exit_:
        number = int(exit_["signal"])
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"was killed by {name}" + (", out of memory" if oom else "")
    return f"exited with code {exit_.get('code')}"


def exit_failed(exit_: Mapping[str, Any]) -> bool:
    """Whether a process that ended like this failed: anything but code 0."""
    return exit_.get("code") != 0


def describe_cause(event: Mapping[str, Any], *, oom: bool = False) -> str:
    """The words for a ``Cause`` of the protocol, read from the event that carries it."""
    match event.get("cause"):
        case "rank_exited":
            early = event.get("early")
            words = f"rank {event['rank']} {describe_exit(event['exit'], oom=oom)}"
            return words if early is None else f"{words} before the end ({early[0]}/{early[1]})"
        case "startup_limit":
            return f"no first commit within {event['limit_s']:g} s"
        case "progress_limit":
            return f"no commit within {event['limit_s']:g} s"
        case "spawn_failed":
            return f"it could not be started: {event['error']}"
        case "cannot_start":
            return f"its command cannot be started, {event['times']} times in a row: {event['error']}"
        case "agent_failed":
            return f"its agent failed at looking after it (please report this): {event['error']}"
        case "elsewhere":
            return f"it ended on another host: {event['reason']}"
        case "budget":
            return str(event["reason"])
        case "stopped":
            return f"it was stopped: {event['reason']}"
        case unknown:
            return f"unknown cause {unknown!r}"
