"""What can be said of why a rank failed, from the event that tells of its end, or of where it hung."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from sky_monarch.tracebacks import culprit, hung_at

__all__ = ["of_exit", "of_hang"]

_TAIL_LINES, _TAIL_CHARS = 8, 300
# faulthandler's dump comes with these, where a script has enabled it.
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def of_exit(event: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a ``rank_exited``: ``exception``, ``where``, ``memory``, ``tail``."""
    tail = list(event.get("tail") or ())
    found = None
    where = None
    if "code" in event["exit"]:
        found = culprit(event.get("traceback") or tail)
        where = found.where
    elif event["exit"].get("signal") in _CRASHES:
        where = hung_at(tail)
    return {
        "exception": found.exception if found else None,
        "where": where,
        "memory": event.get("memory"),
        "tail": [line[:_TAIL_CHARS] for line in tail[-_TAIL_LINES:]],
    }


def of_hang(event: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a ``hung``: ``where`` in Python, else what the kernel says; which rank, and its state."""
    where = hung_at(event["stacks"])
    threads = event["threads"]
    native = None
    if where is None and threads:
        native = threads[0]  # the main thread has the lowest id
    return {"where": where, "hung": {"rank": event["rank"], "state": event["state"], "native": native}}
