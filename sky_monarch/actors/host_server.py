"""The process that serves one host of a mesh: it starts processes for programs elsewhere, and ends with them."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.far_host import SERVER
from sky_monarch.actors.future import VALUE
from sky_monarch.actors.keys import CLIENT, HOST
from sky_monarch.actors.remote_log import RemoteLog
from sky_monarch.actors.runtime import CONTROL, Runtime, adopt, listen_at, make_folder
from sky_monarch.actors.spawner import Proc
from sky_monarch.errors import ConfigError, PeerRefusedError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch._core import ActorGateway, ActorRequest
    from sky_monarch.actors.keys import ActorKeys

__all__ = ["serve"]

_EVENT_S = 3600.0
_HANDSHAKE_S = 10.0
_RETRY_S = (0.1, 5.0)


class _OwnersLog(RemoteLog):
    """Hands lines on as they are: the owner's own log says where they come from."""

    def hear(self, source: str, text: str) -> None:
        del source
        self._write(text)


class _Server:
    """One program's processes on this host."""

    def __init__(self, keys: ActorKeys, name: str, listen: str | None) -> None:
        from sky_monarch import __version__
        from sky_monarch._core import ActorGateway

        folder = make_folder()
        address = f"{folder}/{SERVER}"
        self.runtime = Runtime(folder, os.urandom(32).hex(), address, listen_at(address))
        self.runtime.host = name
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
        self.lock = threading.Lock()
        self.runtime.handlers |= {"start": self.start, "kill": self.kill, "routes": self.routes}
        threading.Thread(target=self.runtime.serve_control, name="sky-monarch-control", daemon=True).start()
        # Not in the main thread, where signals have to be heard.
        threading.Thread(target=self._hear, name="sky-monarch-hosts", daemon=True).start()

    def _hear(self) -> None:
        while not self.closed:
            event = self.gateway.event(_EVENT_S)
            if event is not None:
                self.events.put(event)

    # --- what programs ask for -----------------------------------------------------------------------

    def start(self, request: ActorRequest, owner: str, wanted: list[tuple[int, str, str]]) -> None:
        procs = [self._proc(owner, token, name, address) for token, name, address in wanted]
        with self.lock:
            first = owner not in self.owned
            self.owned.setdefault(owner, {}).update(
                {token: proc for (token, _, _), proc in zip(wanted, procs, strict=True)}
            )
        # The end of the program itself is that of its connection.
        if first and owner != f"{self.client}/client":
            threading.Thread(target=self._attend, args=(owner,), daemon=True).start()
        self.runtime.spawner.start(procs)
        request.reply(VALUE, *serial.dumps(None))

    def _proc(self, owner: str, token: int, name: str, address: str) -> Proc:
        if os.path.dirname(address) != self.runtime.folder:  # noqa: PTH120
            raise ConfigError(f"{address} is no address of this host")
        proc = Proc(name, address, lambda proc: self._ended(owner, token, proc))
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

    def routes(self, request: ActorRequest, _: str, routes: list[tuple[str, str | None]]) -> None:
        assert self.client is not None  # noqa: S101  (nobody else can ask)
        for folder, address in routes:
            if folder != self.runtime.folder:
                self.gateway.route(folder, address, self.client)
        request.reply(VALUE, *serial.dumps(None))

    def _attend(self, owner: str) -> None:
        """End what ``owner`` has started here when it ends."""
        from sky_monarch._core import ActorTargets

        self.runtime.node.call(ActorTargets([(owner, "")]), CONTROL, "attend", serial.dump_whole(())).wait()
        with self.lock:
            procs = list(self.owned.pop(owner, {}).values())
        if procs:
            self.runtime.spawner.kill(procs)

    # --- its life ------------------------------------------------------------------------------------

    def until_lost(self, first_within_s: float | None) -> str:
        """Serve a program until that is gone; returns why. The first that comes is the one."""
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
                return words

    def _say(self, words: str) -> None:
        sys.stderr.write(f"sky-monarch actor-host {self.runtime.host}: {words}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End every process that was started here, and leave nothing."""
        self.closed = True
        if hasattr(self, "gateway"):
            self.gateway.close()
        self.runtime.close()
        shutil.rmtree(self.runtime.folder, ignore_errors=True)


def serve(
    keys: ActorKeys,
    *,
    listen: str | None = None,
    dial: str | None = None,
    name: str | None = None,
    once: bool = False,
    within_s: float | None = None,
) -> None:
    """Serve programs, one after the other, until this process is ended.

    Args:
        keys: Of this host.
        listen: ``host:port`` where the program, or other hosts, may dial; port 0 lets the system choose.
        dial: ``host:port`` of a program that waits for its hosts. Served until it is gone.
        name: What people call this host; its host name by default.
        once: Return when the first program is gone.
        within_s: Longest wait for the first one, in seconds.

    Raises:
        ConfigError: The address or the keys cannot be used.
        PeerRefusedError: The program does not want this host.
        SkyMonarchError: No program came in time.
    """
    import time

    if listen is None and dial is None:
        raise ConfigError(
            "a host of actors either listens or dials", hint="--listen HOST:PORT or --dial HOST:PORT"
        )
    keys.check(HOST)
    at = f"tls:{listen}" if listen is not None else None
    while True:
        server = _Server(keys, name or socket.gethostname(), at)
        try:
            found = server.gateway.address
            if found is not None:
                at = found  # the port that was chosen, for the programs after this one too
                server._say(f"listens at {found.removeprefix('tls:')}")
            end = None if within_s is None else time.monotonic() + within_s
            if dial is not None:
                _dial(server.gateway, f"tls:{dial}", end)
            left = None if end is None else max(0.1, end - time.monotonic())
            server._say(server.until_lost(left))
        finally:
            server.close()
        if once or dial is not None:
            return


def _dial(gateway: ActorGateway, address: str, end: float | None) -> None:
    """Dial the program until it answers."""
    import time

    pause_s, longest_s = _RETRY_S
    while True:
        try:
            gateway.dial(address, CLIENT, _HANDSHAKE_S)
            return
        except (ConfigError, PeerRefusedError):
            raise
        except SkyMonarchError as error:
            if end is not None and time.monotonic() + pause_s > end:
                raise SkyMonarchError(f"no program at {address.removeprefix('tls:')}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
