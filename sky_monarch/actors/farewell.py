"""Tells a program at once that the process which served a host was killed.

The program that such a host has dialled sees its connection end, and cannot know whether the host is gone or a
middlebox has cut the connection: it waits until it is dialled again, 2 s. So a process that has forked off before
outlives the one that serves the host, sees its end (a pipe that nobody else holds), and says so, over a connection of
its own, with the host's certificate and with what names the connection that has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.keys import CLIENT
from sky_monarch.errors import SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Farewell"]

#: Later the program knows anyway.
_TELL_S = 2.0
_END_S = 2.0
_READ = 4096


class Farewell:
    """The process that outlives this one; it is forked here, so there may be no threads yet.

    Args:
        identity: Certificate and key of this host.
    """

    def __init__(self, identity: Mapping[str, str]) -> None:
        reading, self._line = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self._line)
                _outlive(reading, identity)
            finally:
                os._exit(0)
        os.close(reading)

    def about(self, address: str, folder: str, line: int | None) -> None:
        """From here on the program at ``address`` is to be told of the end of this process.

        Args:
            address: ``tls:<host>:<port>``.
            folder: Of this host.
            line: What names its connection to the program; None where there is none.
        """
        self._say([address, folder, line] if line is not None else None)

    def nobody(self) -> None:
        """Nobody is to be told any more: the program is gone, or hears of the end from this process."""
        self._say(None)

    def _say(self, what: Any) -> None:
        with contextlib.suppress(OSError):  # it was killed: then nobody tells
            os.write(self._line, json.dumps(what).encode() + b"\n")

    def close(self) -> None:
        """End it, without a word."""
        self.nobody()
        os.close(self._line)
        end = time.monotonic() + _END_S
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > end:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    break
                time.sleep(0.002)


def _outlive(reading: int, identity: Mapping[str, str]) -> None:
    # Whoever ends the host in order ends it first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    # Who reads what the host prints hears the end of it when that ends.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    said = b"null\n"
    while data := os.read(reading, _READ):
        said = (said + data)[-_READ:]
    whole, _, _ = said.rpartition(b"\n")
    about = json.loads(whole.rpartition(b"\n")[2])
    if about is None:
        return
    from sky_monarch._core import actor_host_killed

    address, folder, line = about
    with contextlib.suppress(SkyMonarchError):  # it is gone too, or not to be reached
        actor_host_killed(identity, (address, CLIENT), (folder, line), _TELL_S)
