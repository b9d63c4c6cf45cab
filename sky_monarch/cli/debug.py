"""``sky-monarch debug``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output

if TYPE_CHECKING:
    from socket import socket as Socket  # noqa: N812  (the command's argument has the other name)

__all__ = ["debug"]

_READ = 4096


def debug(
    socket: Annotated[
        Path | None,
        typer.Argument(
            help="Of a process that waits at breakpoint(), as the program has printed it; without it, all are listed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Attach to a breakpoint() in a process of the actor API, on this host. Ctrl-D leaves it, and the code goes on.

    A process waits only where the program has said procs.debug_option().
    """
    if socket is None:
        waiting = _waiting()
        for found in waiting:
            _output.print_line(str(found))
        if not waiting:
            _output.say(
                "no process of yours waits at a breakpoint() here; one waits only after procs.debug_option()"
            )
        return
    _talk(_dial(socket))


def _waiting() -> list[Path]:
    """Sockets of this user's processes that wait, where programs put them."""
    import tempfile

    folders = {Path(tempfile.gettempdir()), Path("/tmp")}  # noqa: S108  (where long names make the actor API go)
    found = (path for folder in folders for path in folder.glob("sky-monarch-*/*.pdb"))
    return sorted(path for path in found if path.is_socket())


def _dial(path: Path) -> Socket:
    import socket

    from sky_monarch.errors import ConfigError

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(path))
    except OSError as error:
        line.close()
        raise ConfigError(
            f"no process waits at {path}: {error.strerror}", hint="`sky-monarch debug` lists those that do"
        ) from error
    return line


def _talk(line: Socket) -> None:
    """Hand on what is typed, and show what is said, until either side ends."""
    import os
    import selectors
    import sys

    source = sys.stdin.fileno()
    with line, selectors.DefaultSelector() as ready:
        ready.register(line, selectors.EVENT_READ)
        try:
            ready.register(source, selectors.EVENT_READ)
        except PermissionError:  # a file: all of it is there already
            line.sendall(sys.stdin.buffer.read())
            _end_of_input(line)
        while True:
            for key, _ in ready.select():
                if key.fileobj is line:
                    said = line.recv(_READ)
                    if not said:
                        return
                    _output.write_bytes([said])
                    continue
                typed = os.read(source, _READ)
                if typed:
                    line.sendall(typed)
                else:
                    ready.unregister(source)
                    _end_of_input(line)


def _end_of_input(line: Socket) -> None:
    import contextlib
    import socket

    with contextlib.suppress(OSError):  # it has hung up already
        line.shutdown(socket.SHUT_WR)
