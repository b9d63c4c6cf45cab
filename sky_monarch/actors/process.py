"""The life of a process of a mesh, from its fork to its end."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any

from sky_monarch import stacks
from sky_monarch.actors import actor_mesh, hosting, looping, loops, remote_error, serial  # noqa: F401
from sky_monarch.actors.runtime import Runtime, adopt

__all__ = ["live", "pass_over"]


def pass_over(*_: Any, **__: Any) -> None:
    """What ``breakpoint()`` does where it is not enabled: there is no terminal to ask."""
    frame = sys._getframe(1)
    sys.stderr.write(
        f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno} was passed over: "
        "enable it with procs.debug_option(wait_s=300)\n"
    )


def live(name: str, address: str, folder: str, token: str, listener: int) -> int:
    """Serve as process ``name`` until it is told to end; returns the exit code.

    Args:
        name: Of its mesh, and its rank: ``procs[3]``.
        address: Of its socket.
        folder: Where the sockets of the mesh are.
        token: Secret of the mesh.
        listener: Descriptor of its socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What it prints is read by a process: a line leaves when it ends, not when a buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv[:] = [name]
    sys.breakpointhook = pass_over
    stacks.register(f"{address}.stacks")
    made = Runtime(folder, token, address, socket.socket(fileno=listener))
    adopt(made)
    try:
        made.serve_control()
    finally:
        made.close()
    return 0
