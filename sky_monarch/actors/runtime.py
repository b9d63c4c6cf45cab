"""This process's part in a mesh: its node, its actors, and what it has spawned."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.attached import Attached
from sky_monarch.actors.context import point_at
from sky_monarch.actors.future import FAILED, VALUE
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.actors.strays import Strays
from sky_monarch.errors import SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch._core import ActorNode, ActorRequest
    from sky_monarch.actors.failure import MeshFailure
    from sky_monarch.actors.folding import Folds
    from sky_monarch.actors.hosting import Hosted
    from sky_monarch.actors.reference import Kept
    from sky_monarch.actors.spawner import Spawner

__all__ = ["CONTROL", "Runtime", "listen_at", "make_folder", "runtime"]

#: The mailbox of the process itself.
CONTROL = 0
#: What a process is asked about itself, see :mod:`sky_monarch.actors.care`.
CARE = ("doing", "stacks", "breakpoints")
#: A sender gives up on a receiver that takes nothing for so long.
_SEND_LIMIT_S = 60.0
_LONGEST_PATH = 90  # of a folder of sockets; the kernel takes 107 bytes of a socket's path


def listen_at(path: str) -> socket.socket:
    """A socket that listens there, for this user alone, whoever was there before."""
    import contextlib

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    os.fchmod(made.fileno(), 0o600)
    made.bind(path)
    made.listen(1024)
    return made


class Runtime:
    """One a process."""

    def __init__(self, folder: str, token: str, address: str, listener: socket.socket) -> None:
        from sky_monarch._core import ActorNode

        self.folder = folder
        #: Where this process has made the folder, it goes with it; all others of the mesh are guests.
        self.made_folder = False
        self.token = token
        self.pid = os.getpid()
        self.host = socket.gethostname()
        self.node: ActorNode = ActorNode(address, token, listener.detach(), _SEND_LIMIT_S)
        self.address = address
        self.hosted: dict[int, Hosted] = {}
        self.strays = Strays(self)
        self.lock = threading.RLock()
        self.attached = Attached(self)
        #: What else other processes may ask of this one: ``handler(request, *what they sent)``, which answers.
        self.handlers: dict[str, Callable[..., None]] = {"attend": self._attend, "kept": self._tell_kept}
        self.handlers["spawned"] = self.strays.answer
        self.at_close: list[Callable[[], None]] = []
        self._attending: list[ActorRequest] = []
        self._kept: Kept | None = None
        self._folds: Folds | None = None
        #: Tells the processes that this one starts on another host from those of others.
        self.mark = os.urandom(5).hex()
        self._spawner: Spawner | None = None
        self._ending = False

    @property
    def spawner(self) -> Spawner:
        """What starts processes here; it is started itself when it is first needed, and again where it has died."""
        with self.lock:
            if self._spawner is None or (self._spawner.over and not self._ending):
                from sky_monarch.actors.spawner import Spawner

                self._spawner = Spawner(self)
            return self._spawner

    @property
    def kept(self) -> Kept:
        """Results that stay in this process."""
        with self.lock:
            if self._kept is None:
                from sky_monarch.actors.reference import Kept

                self._kept = Kept()
            return self._kept

    def address_on(self, folder: str, name: str) -> str:
        """How the addresses of processes begin that this one starts on a host."""
        if self.attached.host(folder, name) is None:
            # Another process of this host has the same folder, and numbers of its own.
            return self.address
        return f"{folder}/{self.mark}"

    @property
    def folds(self) -> Folds:
        """Answers of other ranks that this process folds."""
        with self.lock:
            if self._folds is None:
                from sky_monarch.actors.folding import Folds

                self._folds = Folds()
            return self._folds

    def serve_control(self) -> None:
        """Do what other processes ask of this one, until it closes."""
        mailbox = self.node.mailbox(CONTROL)
        while not mailbox.closed:
            messages = mailbox.recv(self.strays.wait_s(), 64, False)
            for request in messages:
                if isinstance(request, tuple):
                    continue
                try:
                    if self._control(request):
                        return
                except Exception as error:  # noqa: BLE001  (whoever asked is told)
                    if request.wants_answer:
                        request.reply(FAILED, *serial.dumps(RemoteError.of(error)))
                    else:
                        traceback.print_exc()
            self.strays.refuse()

    def _control(self, request: ActorRequest) -> bool:
        method, place, body, buffers = request.open()
        if method == "spawn":
            from sky_monarch.actors.hosting import Hosted

            actor_id, name, owner, made = serial.loads(body, buffers)
            # What the class needs may take long to import: the actor's own thread does that.
            Hosted(self, actor_id, name, owner, point_at(place), made, request).start()
        elif method == "stray":
            self.strays.expect(place)
        elif method == "missing":
            self.strays.miss(serial.loads(body, buffers))
        elif method == "settled":
            self.strays.settle()
        elif method == "fold":
            self.folds.put(place, body, buffers)
        elif method == "unfold":
            self.folds.forget(serial.loads(body, buffers))
        elif method in CARE:
            from sky_monarch.actors import care

            request.reply(VALUE, *serial.dumps(care.answer(self, method, serial.loads(body, buffers))))
        elif method == "failure":
            self.show(serial.loads(body, buffers))
        elif method == "happened":
            folder, *event = serial.loads(body, buffers)
            host = self.attached.hosts.get(folder)
            if host is not None:
                host.hear(*event)
        elif method == "exit":
            self._stop_actors(serial.loads(body, buffers))
            request.reply(VALUE, *serial.dumps(None))
            return True
        elif method in self.handlers:
            self.handlers[method](request, *serial.loads(body, buffers))
        else:
            raise SkyMonarchError(f"a process of a mesh has no {method}")
        return False

    def _attend(self, request: ActorRequest, *_: object) -> None:
        """Never answered: whoever asks hears of the end of this process so."""
        self._attending.append(request)

    def _tell_kept(self, request: ActorRequest, number: int, rank: int) -> None:
        self.kept.tell(request, number, rank)

    def _stop_actors(self, limit_s: float) -> None:
        import time

        end = time.monotonic() + limit_s
        hosted = list(self.hosted.values())
        for one in hosted:
            one.ask_to_stop()
        for one in hosted:
            one.join(max(0.0, end - time.monotonic()))

    def tell_owner(self, owner: tuple[str, int], failure: MeshFailure) -> None:
        """Hand a failure to the actor that owns what has failed, or to the program where none does."""
        from sky_monarch._core import ActorTargets

        address, actor = owner
        if actor == CONTROL and address == self.address:
            self.show(failure)
            return
        method = "failure" if actor == CONTROL else "__supervise__"
        self.node.send(ActorTargets([(address, "")]), actor, method, *serial.dumps(failure))

    def show(self, failure: MeshFailure) -> None:
        """Nobody has handled it."""
        # The hook is an attribute of the public face, as in Monarch: who has set it has imported that.
        face = sys.modules.get("sky_monarch.actor")
        hook = getattr(face, "unhandled_fault_hook", None)
        try:
            if hook is None:
                sys.stderr.write(failure.report() + "\n")
            else:
                hook(failure)
        except Exception:  # noqa: BLE001  (the program's own hook)
            traceback.print_exc()

    def close(self) -> None:
        """End what this process has spawned, then its own part. Within 5 s."""
        with self.lock:
            if self._ending or self.pid != os.getpid():
                return
            self._ending = True
        self._stop_actors(0.5)
        for close in self.at_close:
            close()
        if self._spawner is not None:
            self._spawner.close()
        self.node.close()


_runtime: Runtime | None = None
_lock = threading.Lock()


def make_folder(only: str = "") -> str:
    """A fresh folder for the sockets of one host, which it names too.

    Args:
        only: Names what has one such folder at a time: those that it had before, and was killed in, are removed.
    """
    import hashlib
    import shutil
    import tempfile

    prefix = "sky-monarch-" + (hashlib.sha256(only.encode()).hexdigest()[:12] + "-" if only else "")
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) > _LONGEST_PATH - 10:
        os.rmdir(folder)  # noqa: PTH106
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    if only:
        place = os.path.dirname(folder)  # noqa: PTH120
        for name in os.listdir(place):  # noqa: PTH208
            if name.startswith(prefix) and f"{place}/{name}" != folder:
                shutil.rmtree(f"{place}/{name}", ignore_errors=True)
    return folder


def adopt(made: Runtime) -> None:
    """Use ``made`` in this process, which was forked for it."""
    global _runtime
    _runtime = made


def runtime() -> Runtime:
    """The runtime of this process, started when it is first needed."""
    global _runtime
    found = _runtime
    if found is not None and found.pid == os.getpid() and not found._ending:
        return found
    with _lock:
        found = _runtime
        if found is not None and found.pid == os.getpid() and not found._ending:
            return found
        if sys.is_finalizing():
            raise SkyMonarchError("the program is ending")
        folder = make_folder()
        address = f"{folder}/client"
        made = Runtime(folder, os.urandom(32).hex(), address, listen_at(address))
        made.made_folder = True
        threading.Thread(target=made.serve_control, name="sky-monarch-control", daemon=True).start()
        # Before the interpreter waits for threads and tears itself down.
        atexit.register(_end, made)
        _runtime = made
        return made


def _end(made: Runtime) -> None:
    made.close()
    if made.pid == os.getpid():
        import shutil

        shutil.rmtree(made.folder, ignore_errors=True)


def end() -> None:
    """End everything now; a later use starts afresh."""
    found: Any = _runtime
    if found is not None and found.pid == os.getpid() and not found._ending:
        atexit.unregister(_end)
        _end(found)
