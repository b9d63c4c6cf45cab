"""Tells an agent that its host is about to be taken away: ``python -m sky_monarch.agent --notice DIR``.

For whoever may not signal the agent, or wants to say how long there is: SkyPilot's hook for pre-emption, a script of
your own. The agent reads it from a file in its run folder, and removes that when it leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sky_monarch.errors import ConfigError

__all__ = ["GRACE_S", "give", "main", "place_of"]

GRACE_S = 30.0
"""What Kubernetes gives a pod unless told otherwise."""

_POLL_S = 0.1


def place_of(directory: Path) -> Path:
    """Where the agent that was started from ``directory`` looks for a notice (``rust_core/src/agent/notice.rs``).

    Raises:
        ConfigError: No agent was.
    """
    config = directory / "agent.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        return Path(values["run_dir"]) / f"notice-{values['host']}.json"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{config} belongs to no agent: {error}") from error


def give(place: Path, *, grace_s: float, reason: str) -> None:
    """Leave a notice where an agent looks for it.

    Args:
        place: The file.
        grace_s: Until the host is taken away.
        reason: Shown in the events.

    Raises:
        ConfigError: It cannot be written there.
    """
    until_ns = time.monotonic_ns() + int(grace_s * 1e9)  # of the one clock that all processes of a host share
    text = json.dumps({"reason": reason, "until_mono_ns": until_ns})
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(place)
    except OSError as error:
        raise ConfigError(f"cannot leave a notice in {place.parent}: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Give notice, and wait until the agent has left or its time is over.

    Args:
        arguments: What follows ``--notice``.

    Returns:
        The exit code: 0 where the agent has left.

    Raises:
        ConfigError: There is no agent to be told.
    """
    parser = argparse.ArgumentParser(prog="python -m sky_monarch.agent --notice")
    parser.add_argument("directory", type=Path, help="folder with the agent's agent.json")
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="SECONDS", help="until the host is gone"
    )
    parser.add_argument("--reason", default="the host is about to be taken away", help="shown in the events")
    chosen = parser.parse_args(arguments)
    if not 0 <= chosen.grace <= 86_400:
        parser.error("--grace is no number of seconds between 0 and 86400")
    place = place_of(chosen.directory)
    give(place, grace_s=chosen.grace, reason=chosen.reason)
    deadline = time.monotonic() + chosen.grace
    while place.exists():
        if time.monotonic() >= deadline:
            sys.stderr.write(f"the agent of {chosen.directory} has not left within {chosen.grace:g} s\n")
            return 1
        time.sleep(_POLL_S)
    return 0
