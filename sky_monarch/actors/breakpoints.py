"""``breakpoint()`` in a process of a mesh: a debugger on a socket that only this user can reach.

Off unless enabled: then ``breakpoint()`` says that it was passed over, and the code goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pdb
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from sky_monarch.actors.runtime import Runtime

__all__ = ["SUFFIX", "enable"]

#: Of the sockets, as `sky-monarch debug` looks for them.
SUFFIX = ".pdb"
_numbers = itertools.count(1)


def enable(runtime: Runtime, wait_s: float | None) -> None:
    """Let ``breakpoint()`` wait for a debugger, ``wait_s`` at the most; None switches it off."""
    if wait_s is None:
        from sky_monarch.actors.process import pass_over

        sys.breakpointhook = pass_over
        return

    def stop(*_: Any, **__: Any) -> None:
        _wait_for_debugger(runtime, sys._getframe(1), wait_s)

    sys.breakpointhook = stop


def _wait_for_debugger(runtime: Runtime, frame: FrameType, wait_s: float) -> None:
    from sky_monarch.actors.remote_log import ATTACH
    from sky_monarch.actors.runtime import listen_at

    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    path = f"{runtime.address}.{next(_numbers)}{SUFFIX}"
    listener = listen_at(path)
    try:
        sys.stderr.write(
            f"breakpoint at {where} in {sys.argv[0]} (pid {os.getpid()}) waits {wait_s:g} s; {ATTACH}{path}\n"
        )
        try:
            connection = _accept(listener, time.monotonic() + wait_s)
        except TimeoutError:
            sys.stderr.write(f"breakpoint at {where}: nobody came within {wait_s:g} s; it goes on\n")
            return
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
    _Debugger(connection).set_trace(frame)


def _accept(listener: socket.socket, end: float) -> socket.socket:
    """The first connection of this user. Raises TimeoutError at ``end``."""
    while True:
        listener.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.geteuid():
            connection.settimeout(None)
            return connection
        connection.close()


class _Debugger(pdb.Pdb):
    """Speaks over a connection. Where that ends, the code goes on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        reading = connection.makefile("r", encoding="utf-8", errors="replace")
        self._writing = connection.makefile("w", encoding="utf-8")
        talking: Any = _Talking(self._writing)
        super().__init__(stdin=reading, stdout=talking, nosigint=True, readrc=False)
        self.use_rawinput = False

    def do_EOF(self, arg: str) -> bool | None:  # noqa: N802  (pdb's name)
        """Whoever was attached has gone."""
        self.clear_all_breaks()
        return self.do_continue(arg)

    def set_continue(self) -> None:
        """Without breakpoints nothing brings it back: then the connection ends."""
        super().set_continue()
        if not self.breaks:
            self._hang_up()

    def set_quit(self) -> None:
        """The code is ended by ``bdb.BdbQuit``."""
        super().set_quit()
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._writing.flush()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Talking:
    """A stream that may have lost its reader."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
