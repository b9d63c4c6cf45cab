"""The way to ranks of hosts that can only dial out: told to this host's agent before it is taken.

Such a host has an address of its own inside of ``127.64.0.0/10``, and its ranks listen there. The agents of the
*other* hosts listen at the same address, at the ports that their ranks ask for, and carry what comes through the head.
So nothing that dials has to know of it, gloo and TorchFT's manager included; somebody has to ask before they dial,
which is this.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable

__all__ = ["Tunnel"]

_LIMIT_S = 5.0
_MOST_BYTES = 1 << 16


class _RefusedError(ConnectionError):
    """The agent has answered: an address cannot be had here."""


class Tunnel:
    """This rank's word with its agent.

    Args:
        address: Where the agent listens, ``unix:<path>``.
    """

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("unix:")
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._kept: dict[str, tuple[str, ...]] = {}

    def reach(self, keep: str, addresses: Iterable[str]) -> None:
        """Have these addresses lead to the ranks that listen there, before anybody dials them.

        Args:
            keep: Under which name. What was reached under it before, and is not among these, leads nowhere any more;
                connections that were made stay.
            addresses: ``host:port`` each. Those that are no other host's are passed over.

        Raises:
            ConnectionError: The agent does not answer, or an address cannot be had here.
        """
        wanted = tuple(dict.fromkeys(addresses))
        with self._lock:
            try:
                _ask(self._socket or self._dial(but=keep), keep, wanted)
            except _RefusedError:
                raise  # nothing has changed: the line stays, and all that leads somewhere over it
            except TimeoutError as error:
                self._hang_up()
                raise ConnectionError(f"the tunnel: no answer of the agent within {_LIMIT_S:g} s") from error
            except ConnectionError:
                self._hang_up()
                raise
            except OSError as error:
                self._hang_up()
                raise ConnectionError(f"the tunnel: {error}") from error
            self._kept[keep] = wanted

    def _dial(self, *, but: str) -> socket.socket:
        """Anew, with all that is kept: the agent let go of it with the last connection.

        Args:
            but: The name that is asked for next: what was kept under it is not wanted any more.
        """
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_LIMIT_S)
        self._socket = line
        line.connect(self._path)
        for keep in [keep for keep in self._kept if keep != but]:
            try:
                _ask(line, keep, self._kept[keep])
            except _RefusedError:
                # Something else listens there by now, or its peer is gone. Asked for again each time, it would fail
                # every later question; whoever needs it asks before they dial, and hears the reason then.
                del self._kept[keep]
        return line

    def _hang_up(self) -> None:
        line, self._socket = self._socket, None
        if line is not None:
            line.close()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._kept.clear()
            self._hang_up()


def _ask(line: socket.socket, keep: str, addresses: tuple[str, ...]) -> None:
    question = {"keep": keep, "reach": list(addresses)}
    line.sendall(json.dumps(question).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        more = line.recv(4096)
        if not more or len(answer) > _MOST_BYTES:
            raise ConnectionError("the tunnel: the agent hung up")
        answer += more
    if error := json.loads(answer)["error"]:
        raise _RefusedError(f"the tunnel: {error}")
