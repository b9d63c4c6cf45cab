"""A port for what binds it by itself, and cannot be handed a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def reserved(host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a free port from everybody who asks the system for any, until it is closed.

    One that was free a moment ago may be somebody's own end of a connection by the time it is bound. Whoever binds
    this one by its number has it all the same, as servers do (``SO_REUSEADDR``): nobody listens here.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Number of such a port, for the length of the block."""
    with reserved(host) as held:
        yield held.getsockname()[1]
