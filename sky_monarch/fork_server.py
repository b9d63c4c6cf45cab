"""What standbys are forked from: a process that has imported, once for its host, what the job preloads.

``python -m sky_monarch.worker --serve --preload=a,b -- python x.py args`` imports, says ``ready`` on its
descriptor 3 and forks a standby for each request that it reads there. The request's descriptors are the standby's
output, its end of the promotion's socket, and a file that holds its environment.

A fork has to be of a process with one thread and no open accelerator: neither survives it. Where an import has
started one, the process says so (``refused``), and standbys import for themselves.

It forks twice. The process in the middle ends at once, so that the agent, the nearest subreaper, becomes the parent
of the standby, as if it had started that itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Birth", "serve"]

_LINE_FD = 3
# Requests are short: the environment comes in a file.
_MOST_BYTES = 4096
_FDS = 3
# Shorter than the agent waits, so that it hears why.
_ADOPTION_LIMIT_S = 8.0
_FAILED = 70
# A process that has one of these open has a context that its fork would share.
_DEVICES = ("/dev/kfd", "/dev/nvidia")


@dataclass(frozen=True, slots=True)
class Birth:
    """What a forked standby is told of itself.

    Attributes:
        ahead: It runs the script, up to its session.
    """

    ahead: bool


def serve(missing: str = "") -> Birth:
    """Fork standbys; returns in each of them alone.

    Args:
        missing: What of ``preload`` could not be imported; the agent is told.

    Raises:
        SystemExit: The agent needs no more of them (code 0), or none can be forked (code 0, said before).
    """
    line = socket.socket(fileno=os.dup(_LINE_FD))
    line.settimeout(None)  # an import may have set a default for all sockets
    line.set_inheritable(False)
    os.close(_LINE_FD)
    # What was imported stays where it is: a collection that touched it would copy it into every standby.
    gc.collect()
    gc.freeze()
    obstacle = _obstacle()
    if missing:
        line.sendall(f"short {missing}".encode()[:_MOST_BYTES])
    if obstacle is None:
        line.sendall(b"ready")
    while obstacle is None:
        data, fds, _, _ = socket.recv_fds(line, _MOST_BYTES, _FDS)
        if not data:
            raise SystemExit(0)
        request = json.loads(data)
        obstacle = _obstacle()  # an import may start a thread late
        if obstacle is None and _fork(line, request):
            return _live(line, request, fds)
        for fd in fds:
            os.close(fd)
    line.sendall(f"refused {obstacle}".encode()[:_MOST_BYTES])
    raise SystemExit(0)


def _obstacle() -> str | None:
    """Why this process must not be forked."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  # a kernel's folder
    if threads > 1:
        return f"the imports of `preload` left {threads - 1} more threads running, which a fork would lose"
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith(_DEVICES):
            return f"the imports of `preload` opened {target}, which a fork must not share"
    return None


def _fork(line: socket.socket, request: dict[str, Any]) -> bool:
    """Fork twice; true in the grandchild, which is to become the standby."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # an import replaced or closed it
            stream.flush()
    try:
        middle = os.fork()
    except OSError as error:
        _fail(line, request, error)
        return False
    if middle:
        with contextlib.suppress(ChildProcessError):  # an import has arranged that children reap themselves
            os.waitpid(middle, 0)
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        _fail(line, request, error)
        os._exit(_FAILED)
    return True


def _fail(line: socket.socket, request: dict[str, Any], error: BaseException) -> None:
    """Say why there will be no such standby."""
    with contextlib.suppress(OSError):  # nobody waits for it any more
        line.sendall(f"failed {request['id']} {error}".encode()[:_MOST_BYTES])


def _live(line: socket.socket, request: dict[str, Any], fds: list[int]) -> Birth:
    """Become the standby that ``request`` asks for; the agent hears of it from the standby itself."""
    from sky_monarch import _core

    try:
        output, promotion, environment = fds
        _core.settle_forked(request["agent"], request["spawn_id"], request["nice"], _ADOPTION_LIMIT_S)
        with open(environment, encoding="utf-8") as file:  # noqa: PTH123  # a descriptor
            env = json.load(file)["env"]
        os.environ.clear()
        os.environ.update(env)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.dup2(promotion, _LINE_FD, inheritable=False)
        if promotion != _LINE_FD:
            os.close(promotion)
        own = os.pidfd_open(os.getpid())
        socket.send_fds(line, [f"born {request['id']}".encode()], [own])
        os.close(own)
        line.close()
    except BaseException as error:  # noqa: BLE001  # whatever it is
        _fail(line, request, error)
        # The stack below is the fork server's, and must not be returned to.
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(_FAILED)
    _part_ways()
    return Birth(ahead=request["until"] == "session")


def _part_ways() -> None:
    """What a process of its own would have drawn for itself, and `random` draws anew after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
