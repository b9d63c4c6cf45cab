"""The process that serves one host of a mesh: it starts processes for programs elsewhere, and ends with them."""

from __future__ import annotations

import atexit
import errno
import os
import queue
import shutil
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.far_host import SERVER
from sky_monarch.actors.farewell import Farewell
from sky_monarch.actors.future import FAILED, VALUE
from sky_monarch.actors.keys import CLIENT, HOST
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.actors.remote_log import RemoteLog
from sky_monarch.actors.runtime import CONTROL, Runtime, adopt, listen_at, make_folder
from sky_monarch.actors.spares import Spares
from sky_monarch.actors.spawner import Proc
from sky_monarch.errors import ConfigError, LaunchError, PeerRefusedError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch._core import ActorGateway, ActorRequest
    from sky_monarch.actors.keys import ActorKeys

__all__ = ["serve"]

_EVENT_S = 3600.0
#: Of the loss of a program: it has taken its leave (rust_core/py/src/actor_gateway.rs).
LEFT = "left"
_HANDSHAKE_S = 10.0
_RETRY_S = (0.1, 5.0)
#: A program that was cut off is dialled again for so long; the host is of no use without it.
_RETURN_S = 60.0
_REFUSED = os.strerror(errno.ECONNREFUSED)
#: Where nobody listens for so long, the program has ended.
_NOBODY_S = 1.0


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class _OwnersLog(RemoteLog):
    """Hands lines on as they are: the owner's own log says where they come from."""

    def hear(self, source: str, text: str) -> None:
        del source
        self._write(text)


class _Server:
    """One program's processes on this host."""

    def __init__(self, keys: ActorKeys, name: str, listen: str | None, only: str) -> None:
        from sky_monarch import __version__
        from sky_monarch._core import ActorGateway

        folder = make_folder(only)
        # Whoever ends this process may do so while it closes.
        atexit.register(_remove, folder)
        address = f"{folder}/{SERVER}"
        self.runtime = Runtime(folder, os.urandom(32).hex(), address, listen_at(address))
        self.runtime.host = name
        self.runtime.made_folder = True
        adopt(self.runtime)
        try:
            self.gateway: ActorGateway = ActorGateway(
                folder, self.runtime.token, name, __version__, keys.identity, hub=False, listen=listen
            )
        except BaseException:
            self.close()
            raise
        self.client: str | None = None
        self.events: queue.SimpleQueue[tuple[str, str, str, str]] = queue.SimpleQueue()
        self.closed = False
        self.owned: dict[str, dict[int, Proc]] = {}
        self.spares: dict[tuple[str, str], Spares] = {}
        self.lock = threading.Lock()
        asked = (self.start, self.kill, self.routes, self.warm, self.cool, self.load, self.place)
        self.runtime.handlers |= {handler.__name__: handler for handler in asked}
        threading.Thread(target=self.runtime.serve_control, name="sky-monarch-control", daemon=True).start()
        # Not in the main thread, where signals have to be heard.
        threading.Thread(target=self._hear, name="sky-monarch-hosts", daemon=True).start()

    def _hear(self) -> None:
        while not self.closed:
            event = self.gateway.event(_EVENT_S)
            if event is not None:
                self.events.put(event)

    # --- what programs ask for -----------------------------------------------------------------------

    def start(
        self,
        request: ActorRequest,
        owner: str,
        wanted: list[tuple[int, str, str]],
        standby: tuple[str, int, list[str]] | None,
    ) -> None:
        procs = [self._proc(owner, token, name, address) for token, name, address in wanted]
        with self.lock:
            first = owner not in self.owned
            self.owned.setdefault(owner, {}).update(
                {token: proc for (token, _, _), proc in zip(wanted, procs, strict=True)}
            )
            spares = None if standby is None else self._spares(owner, *standby)
        # The end of the program itself is that of its connection.
        if first and not owner.endswith("/client"):
            threading.Thread(target=self._attend, args=(owner,), daemon=True).start()
        self.runtime.spawner.start(procs, [] if spares is None else spares.take(len(procs)))
        request.reply(VALUE, *serial.dumps(None))
        if spares is not None:
            spares.fill_later()

    def _spares(self, owner: str, mesh: str, count: int, described: list[str]) -> Spares:
        found = self.spares.get((owner, mesh))
        if found is None:
            found = self.spares[owner, mesh] = Spares(self.runtime.spawner, mesh, count, described)
        return found

    def warm(self, request: ActorRequest, owner: str, mesh: str, count: int, described: list[str]) -> None:
        """Actors that are described may have to be made on this host."""
        with self.lock:
            spares = self._spares(owner, mesh, count, [])
        spares.expect(described)
        request.reply(VALUE, *serial.dumps(None))

    def cool(self, request: ActorRequest, owner: str, mesh: str) -> None:
        """No process has to stand by for that mesh any more."""
        with self.lock:
            spares = self.spares.pop((owner, mesh), None)
        if spares is not None:
            spares.close()
        request.reply(VALUE, *serial.dumps(None))

    def load(self, request: ActorRequest, _: str) -> None:
        """Which processes run here, by the names of their sockets."""
        with self.lock:
            names = [os.path.basename(one.address) for procs in self.owned.values() for one in procs.values()]  # noqa: PTH119
        request.reply(VALUE, *serial.dumps(names))

    def place(self, request: ActorRequest, owner: str, *what: Any) -> None:
        """Somebody here wants a place for what ran on a host that is lost: the program knows."""
        from sky_monarch._core import ActorTargets

        del owner
        body = serial.dumps((self.runtime.address, *what))
        asked = self.runtime.node.call(ActorTargets([(f"{self.client}/client", "")]), CONTROL, "place", *body)

        def pass_on() -> None:
            asked.wait()
            for _, kind, answer, buffers in asked.take():
                if kind < 0:
                    request.reply(FAILED, *serial.dumps(RemoteError.of(LaunchError(str(answer)))))
                else:
                    request.reply(kind, answer, buffers)

        threading.Thread(target=pass_on, name="sky-monarch-place", daemon=True).start()

    def _proc(self, owner: str, token: int, name: str, address: str) -> Proc:
        # It is addressed by the host whose place this one has, where that was lost.
        own = f"{self.runtime.folder}/{os.path.basename(address)}"  # noqa: PTH119
        proc = Proc(name, own, lambda proc: self._ended(owner, token, proc))
        proc.on_born = lambda proc: self._tell(owner, "born", token, proc.pid)
        proc.log = _OwnersLog(lambda text: self._tell(owner, "said", token, text))
        return proc

    def _ended(self, owner: str, token: int, proc: Proc) -> None:
        # A child of it may have inherited its sockets: then no end of file tells of its death.
        self.gateway.hang_up(os.path.basename(proc.address))  # noqa: PTH119
        with self.lock:
            self.owned.get(owner, {}).pop(token, None)
        self._tell(owner, "dead", token, proc.pid or 0, proc.status, proc.lines)

    def _tell(self, owner: str, *event: Any) -> None:
        from sky_monarch._core import ActorTargets

        body = serial.dumps((self.runtime.folder, *event))
        # An owner that is gone needs to hear nothing: its processes are being ended.
        self.runtime.node.send(ActorTargets([(owner, "")]), CONTROL, "happened", *body)

    def kill(self, request: ActorRequest, owner: str, tokens: list[int]) -> None:
        with self.lock:
            found = self.owned.get(owner, {})
            procs = [found[token] for token in tokens if token in found]
        self.runtime.spawner.kill(procs)
        request.reply(VALUE, *serial.dumps(None))

    def routes(self, request: ActorRequest, owner: str, routes: list[tuple[str, str | None]]) -> None:
        # It is the program that asks, perhaps before anybody here has heard of it.
        program = os.path.dirname(owner)  # noqa: PTH120
        for folder, address in routes:
            if folder != self.runtime.folder:
                self.gateway.route(folder, address, program)
        request.reply(VALUE, *serial.dumps(None))

    def _attend(self, owner: str) -> None:
        """End what ``owner`` has started here when it ends."""
        from sky_monarch._core import ActorTargets

        self.runtime.node.call(ActorTargets([(owner, "")]), CONTROL, "attend", serial.dump_whole(())).wait()
        with self.lock:
            procs = list(self.owned.pop(owner, {}).values())
            spares = [self.spares.pop(key) for key in list(self.spares) if key[0] == owner]
        for one in spares:
            one.close()
        if procs:
            self.runtime.spawner.kill(procs)

    # --- its life ------------------------------------------------------------------------------------

    def until_lost(self, first_within_s: float | None) -> tuple[str, bool]:
        """Serve a program until that is gone; the first that comes is the one.

        Returns:
            Why it is gone, and whether it has taken its leave.
        """
        import time

        end = None if first_within_s is None else time.monotonic() + first_within_s
        while True:
            waiting = end is not None and self.client is None
            limit = max(0.0, end - time.monotonic()) if waiting and end is not None else _EVENT_S
            try:
                kind, folder, words, certificate = self.events.get(timeout=limit)
            except queue.Empty:
                if waiting:
                    raise SkyMonarchError(f"no program has come within {first_within_s:g} s") from None
                continue
            if kind == "joined" and certificate == CLIENT:
                if self.client is None:
                    self.client = folder
                    self._say(f"attached to the program on {words}")
                elif folder != self.client:
                    self.gateway.drop_host(folder, "this host serves another program")
            elif kind == "lost" and folder == self.client:
                return words, certificate == LEFT

    def _say(self, words: str) -> None:
        sys.stderr.write(f"sky-monarch actor-host {self.runtime.host}: {words}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End every process that was started here, and leave nothing."""
        self.closed = True
        if hasattr(self, "gateway"):
            self.gateway.close()
        self.runtime.close()
        _remove(self.runtime.folder)
        atexit.unregister(_remove)


def serve(
    keys: ActorKeys,
    *,
    listen: str | None = None,
    dial: str | None = None,
    name: str | None = None,
    once: bool = False,
    within_s: float | None = None,
    only: str = "",
) -> None:
    """Serve programs, one after the other, until this process is ended.

    Args:
        keys: Of this host.
        listen: ``host:port`` where the program, or other hosts, may dial; port 0 lets the system choose.
        dial: ``host:port`` of a program that waits for its hosts. Served until it is gone. Where it was cut off, it is
            dialled again: to that program it is another host, which may have the place of the one that is lost.
        name: What people call this host; its host name by default.
        once: Return when the first program is gone.
        within_s: Longest wait for the first one, in seconds.
        only: Names this host among all that may run on its machine, where it is started anew after it was killed: what
            it has left is removed then.

    Raises:
        ConfigError: The address or the keys cannot be used.
        PeerRefusedError: The program does not want this host.
        SkyMonarchError: No program came in time.
    """
    if listen is None and dial is None:
        raise ConfigError(
            "a host of actors either listens or dials", hint="--listen HOST:PORT or --dial HOST:PORT"
        )
    keys.check(HOST)
    # Who is dialled hears of the end of who listens at once.
    farewell = Farewell(keys.identity) if dial is not None else None
    try:
        _serve(keys, farewell, listen, dial, name, once=once, within_s=within_s, only=only)
    finally:
        if farewell is not None:
            farewell.close()


def _serve(
    keys: ActorKeys,
    farewell: Farewell | None,
    listen: str | None,
    dial: str | None,
    name: str | None,
    *,
    once: bool,
    within_s: float | None,
    only: str,
) -> None:
    import time

    at = f"tls:{listen}" if listen is not None else None
    returns = False
    while True:
        server = _Server(keys, name or socket.gethostname(), at, only)
        try:
            found = server.gateway.address
            if found is not None:
                at = found  # the port that was chosen, for the programs after this one too
                server._say(f"listens at {found.removeprefix('tls:')}")
            end = None if within_s is None else time.monotonic() + within_s
            if dial is not None:
                program = _dial(server.gateway, f"tls:{dial}", end, returns)
                if program is None:
                    return
                if farewell is not None:
                    folder = server.runtime.folder
                    farewell.about(f"tls:{dial}", folder, server.gateway.line(program))
            left = None if end is None else max(0.1, end - time.monotonic())
            words, was_left = server.until_lost(left)
            if farewell is not None:
                farewell.nobody()
            server._say(words)
        finally:
            server.close()
        if once or (dial is not None and was_left):
            return
        if dial is not None:
            returns, within_s = True, _RETURN_S


def _dial(gateway: ActorGateway, address: str, end: float | None, returns: bool) -> str | None:
    """Dial the program until it answers; returns its folder. None where this host ``returns``, and it has ended."""
    import time

    began = time.monotonic()
    pause_s, longest_s = _RETRY_S
    while True:
        try:
            return gateway.dial(address, CLIENT, _HANDSHAKE_S)[0]
        except (ConfigError, PeerRefusedError):
            if returns:
                return None  # another program is there by now
            raise
        except SkyMonarchError as error:
            if returns and _REFUSED in str(error) and time.monotonic() - began > _NOBODY_S:
                return None
            if end is not None and time.monotonic() + pause_s > end:
                raise SkyMonarchError(f"no program at {address.removeprefix('tls:')}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
