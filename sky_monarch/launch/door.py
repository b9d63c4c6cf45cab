"""How the API of a head that is a cluster is reached from here: it answers at the run's own socket, as any other's.

``door.json`` says how. A head of the local provider is a process of this machine: the socket is a link to its own. One
of SkyPilot's is reached by the SSH that SkyPilot sets up, which forwards the socket: no port is opened for it. Whoever
finds the forwarding gone starts it again, so it belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sky_monarch.errors import ChannelError
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import RunFolder, write_json
from sky_monarch.launch.process import Process

__all__ = ["Door", "close_door", "open_door"]

# On Kubernetes and Slurm SSH goes through a proxy of SkyPilot's, which first imports all of it.
_CONNECT_S = 60
_OPEN_S = 75.0
_LOCK_S = 90.0
_LOOK_S = 0.05
_FORWARD = (
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={_CONNECT_S}"),
    *("-o", "ExitOnForwardFailure=yes"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "StreamLocalBindMask=0177"),
    *("-o", "StreamLocalBindUnlink=yes"),
    *("-o", "ControlMaster=no"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the API of a head is.

    Attributes:
        socket: Path of its socket, on the machine that the head is.
        ssh: Arguments of ``ssh`` that lead to that machine; empty where it is this one.
    """

    socket: str
    ssh: tuple[str, ...] = ()

    def keep(self, folder: RunFolder) -> None:
        """Write down how the head of a run is reached."""
        write_json(folder.door, asdict(self))

    @classmethod
    def of(cls, folder: RunFolder) -> Door | None:
        """How the head of a run is reached; None while nobody knows."""
        try:
            kept = json.loads(folder.door.read_text(encoding="utf-8"))
            return cls(socket=str(kept["socket"]), ssh=tuple(map(str, kept["ssh"])))
        except (OSError, ValueError, LookupError, TypeError):
            return None


def open_door(folder: RunFolder) -> None:
    """Have the head's API answer at the socket of the run, where that is not so already. Costs nothing then.

    Raises:
        ChannelError: The head cannot be reached from here.
    """
    door = Door.of(folder)
    if door is None or _is_open(folder, door):
        return
    with _turn(folder):
        if _is_open(folder, door):
            return
        try:
            folder.api.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if door.ssh:
                _forward(folder, door)
            else:
                _link(folder.api, door.socket)
        except OSError as error:
            raise ChannelError(f"the way to the head cannot be opened: {error}") from error


def close_door(folder: RunFolder) -> None:
    """End what leads to the head."""
    if (forwarding := folder.process("door")) is not None:
        forwarding.signal(signal.SIGTERM)
    for path in (folder.api, folder.path / "door.pid"):
        with contextlib.suppress(OSError):
            path.unlink()


def _is_open(folder: RunFolder, door: Door) -> bool:
    if door.ssh:
        return folder.process("door") is not None and folder.api.exists()
    try:
        return str(folder.api.readlink()) == door.socket
    except OSError:
        return False


def _link(path: Path, target: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    draft.symlink_to(target)
    draft.replace(path)


def _forward(folder: RunFolder, door: Door) -> None:
    """Start the forwarding, in a session of its own, and wait until it stands."""
    if (old := folder.process("door")) is not None:
        old.signal(signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        folder.api.unlink()
    argv = ["ssh", "-N", "-T", *_FORWARD, "-L", f"{folder.api}:{door.socket}", *door.ssh]
    log_path = folder.path / "door.log"
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        started = subprocess.Popen(
            argv,
            cwd="/",
            env=agent_environment(folder.run_id),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    threading.Thread(target=started.wait, name="door-reaper", daemon=True).start()
    if known := Process.of(started.pid):
        write_json(folder.path / "door.pid", {"pid": known.pid, "start_ticks": known.start_ticks})
    deadline = time.monotonic() + _OPEN_S
    while not folder.api.exists():
        if started.poll() is not None or time.monotonic() > deadline:
            started.kill()
            said = log_path.read_text(errors="replace").strip().splitlines()
            why = said[-1][:300] if said else f"nothing within {_OPEN_S:.0f} s"
            raise ChannelError(f"{folder.head} cannot be reached by SSH: {why}", hint=f"see {log_path}")
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _turn(folder: RunFolder) -> Iterator[None]:
    """One at a time: two forwardings would take each other's socket away."""
    handle = os.open(folder.path / "door.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ChannelError(
                        f"somebody has been opening the way to {folder.head} for long"
                    ) from None
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)
