"""A controller that is killed at its nth boundary: before or after an event is stored, a command or an ack is sent.

``python -m tests.support.dying_controller CONFIG`` with ``DIES_AT=n``; without it, or once it passes ``n``, it is the
controller as it is. It counts from the first agent on: before that nobody can have heard anything of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sky_monarch.controller.__main__ import main
from sky_monarch.controller.agents import Agents
from sky_monarch.controller.journal import Journal

_heard: list[int] = []
_left = int(os.environ.get("DIES_AT", "-1"))


def _boundary() -> None:
    global _left
    if not _heard:
        return
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _left -= 1


def _around(act: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        _boundary()
        result = act(*arguments, **options)
        _boundary()
        return result

    return wrapped


def _hears(opened: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(agents: Agents, connection: int, peer: Any) -> Any:
        _heard.append(connection)
        return opened(agents, connection, peer)

    return wrapped


Agents._opened = _hears(Agents._opened)  # type: ignore[method-assign]
Agents.send = _around(Agents.send)  # type: ignore[method-assign]
Journal._write = _around(Journal._write)  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv))
