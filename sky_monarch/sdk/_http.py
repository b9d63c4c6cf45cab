"""httpx without its command line, which would bring all of rich along: a third of what a ``status`` costs."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["load_httpx"]

_COMMAND_LINE = "httpx._main"
_LOCK = threading.Lock()


def load_httpx() -> Any:
    """The module ``httpx``, from any thread. Whoever has imported it before has it as it is.

    ``httpx.main`` is then what it is in an installation without ``httpx[cli]``: only its own command needs more.
    """
    with _LOCK:
        is_first = "httpx" not in sys.modules
        if is_first:
            sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]  # "cannot be imported"
        try:
            import httpx  # also waits for another thread that is in the middle of it
        finally:
            if is_first:
                del sys.modules[_COMMAND_LINE]
    return httpx
