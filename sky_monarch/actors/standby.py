"""A process that stands by: forked, with what its actors will need imported, without a place in a mesh yet."""

from __future__ import annotations

import base64
import json
import socket
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.zygote_limits import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["describe", "stand_by"]

#: Of what is told at a time: it travels as text, in one message.
_MOST_BYTES = MOST_BYTES // 2


def describe(classes: Iterable[type[Any]]) -> list[str]:
    """What a process is told of the classes of its actors to come, as text. What is too large is left out."""
    told = (base64.b64encode(serial.dump_whole(cls)).decode() for cls in classes)
    return [text for text in told if len(text) <= _MOST_BYTES]


def stand_by(line: socket.socket) -> tuple[str, str, int] | None:
    """Import what ``line`` tells of, until it names a place; none where it closes first.

    Returns:
        Name, address and listening socket.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, 1)
        if not data:
            return None
        message = json.loads(data)
        if "name" in message:
            return message["name"], message["address"], fds[0]
        _import(message["warm"])


def _import(described: str) -> None:
    import contextlib

    # What is wrong with it, its actor says when it is made.
    with contextlib.suppress(Exception):
        serial.loads(base64.b64decode(described))
