"""Runs whose head is a cluster, from here: their launcher is started, and told to end them.

The launcher is the provisioner, the one process that such a run has on this machine. It holds what the head does not:
credentials. Without it the run trains on, and hosts that are lost stay lost. Whatever is to end goes through it, since
it alone knows what was asked of a provider; the order is a file, so that it outlives whoever was told.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.errors import LaunchError
from sky_monarch.launch.folder import Phase, RunFolder, name_lock, write_json
from sky_monarch.launch.local import check_resumable, deaf, reap, require_core, spawn

__all__ = ["EndOrder", "begin", "end", "end_order", "resume", "undo"]

_FILE = "end.json"
_POLL_S = 0.05
_TELL_EVERY_S = 1.0
_UNDO_S = 600.0
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """That a run is to end.

    Attributes:
        reason: Why, for its events.
        grace_s: Seconds between TERM and KILL.
    """

    reason: str
    grace_s: float


def end_order(run_dir: Path) -> EndOrder | None:
    """The order to end a run; None where nobody gave one."""
    try:
        kept = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        return EndOrder(reason=str(kept["reason"]), grace_s=float(kept["grace_s"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return EndOrder(reason="down", grace_s=10.0)  # damaged, but there


def begin(folder: RunFolder) -> bool:
    """Start the launcher of a run, unless it runs or the run has ended.

    Returns:
        Whether it was started.

    Raises:
        LaunchError: It cannot be.
    """
    if folder.phase() is Phase.ENDED or folder.agent() is not None:
        return False
    require_core()
    with name_lock(folder.name, folder.path.parent.parent):
        if folder.phase() is Phase.ENDED or folder.agent() is not None:
            return False
        check_resumable(folder)
        spawn(folder, folder.agent_argv)
    return True


def resume(folder: RunFolder, *, ready: Callable[[RunFolder], bool], deadline_s: float = 60.0) -> bool:
    """Start the launcher of a run where it is missing, and wait until its head answers.

    Args:
        folder: Of the run.
        ready: Says whether its controller answers.
        deadline_s: Longest wait for that, once its head is up.

    Returns:
        False where there was nothing to do.

    Raises:
        LaunchError: It cannot be taken up again, or its head does not answer: the launcher goes on trying.
    """
    if not begin(folder):
        return False
    start = time.monotonic()
    while not ready(folder) and folder.phase() is not Phase.ENDED:
        if folder.phase() is Phase.LAUNCHING:
            start = time.monotonic()
        if time.monotonic() - start > deadline_s:
            raise LaunchError(
                f"the head of {folder.run_id}, cluster {folder.head}, has not answered for {deadline_s:.0f} s; "
                "its launcher runs by now, and goes on trying",
                hint=f"`sky-monarch down {folder.run_id}` ends the run, its hosts and its head",
            )
        time.sleep(_POLL_S)
    return True


def end(
    folder: RunFolder,
    *,
    reason: str,
    grace_s: float,
    limit_s: float,
    told: Callable[[], None] | None = None,
) -> bool:
    """Have the launcher end a run, its hosts and its head, and wait for that. Safe to repeat.

    Args:
        folder: Of the run.
        reason: Shown in its events.
        grace_s: Seconds between TERM and KILL.
        limit_s: Longest wait.
        told: Called about once a second meanwhile.

    Returns:
        Whether it has ended; False where that takes longer.

    Raises:
        LaunchError: The launcher cannot be started.
    """
    if folder.phase() is Phase.ENDED:
        return True
    if end_order(folder.path) is None:
        write_json(folder.path / _FILE, {"reason": reason, "grace_s": grace_s})
    start = time.monotonic()
    tell_s = start + _TELL_EVERY_S
    while folder.phase() is not Phase.ENDED or folder.agent() is not None:
        now = time.monotonic()
        if now - start > limit_s:
            return False
        begin(folder)  # also where it was killed meanwhile
        if told is not None and now > tell_s:
            tell_s = now + _TELL_EVERY_S
            told()
        time.sleep(_POLL_S)
    return True


def undo(folder: RunFolder, reason: str) -> None:
    """End what a launch that failed has begun; what could not be ended is in the final status."""
    with deaf(), contextlib.suppress(LaunchError, OSError):
        if folder.agent() is not None or folder.door.exists():
            end(folder, reason=reason, grace_s=_GRACE_S, limit_s=_UNDO_S)
    reap(folder, grace_s=_GRACE_S)
