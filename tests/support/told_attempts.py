"""A controller over a channel that says nothing of attempts: simulated agents say theirs in place of their pid.

``python -m tests.support.told_attempts CONFIG``. Where the channel says it, this is the controller as it is.
"""

from __future__ import annotations

import sys
from typing import Any

from sky_monarch.controller.__main__ import main
from sky_monarch.controller.agents import Agents, Incoming

_opened = Agents._opened


def _with_attempt(agents: Agents, connection: int, peer: Any) -> list[Incoming]:
    if isinstance(peer, dict) and "attempt" not in peer and peer.get("pid", 0) < 100:
        peer = {**peer, "attempt": peer["pid"]}
    return _opened(agents, connection, peer)


Agents._opened = _with_attempt  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv))
