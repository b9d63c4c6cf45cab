"""The runtimes that are measured, each by its own module: `make` loads one.

A module here is imported in the peer's environment only, which need not have this project's dependencies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benches.actors.peers.peer import Peer

#: Ours first; the versions of the others are in constraints.txt.
NAMES = ("sky-monarch", "monarch", "ray")
_MODULES = {"sky-monarch": "sky", "monarch": "torchmonarch", "ray": "ray_project"}


def make(name: str) -> Peer:
    """Make the peer of this name.

    Raises:
        ImportError: It is not installed here.
    """
    found: Peer = importlib.import_module(f"{__name__}.{_MODULES[name]}").PEER()
    return found
