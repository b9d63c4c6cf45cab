"""httpx without its command line, which would bring all of rich along: a third of what a ``status`` costs."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["load_httpx"]

_COMMAND_LINE = "httpx._main"


def load_httpx() -> Any:
    """The module ``httpx``. Whoever has imported it before has it as it is; ``httpx.main`` is for its own command."""
    if "httpx" in sys.modules:
        return sys.modules["httpx"]
    # httpx goes on without where that cannot be imported, as in an installation without httpx[cli].
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        if sys.modules.get(_COMMAND_LINE) is None:
            sys.modules.pop(_COMMAND_LINE, None)
    return httpx
