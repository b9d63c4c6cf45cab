"""Attaching to hosts: those that listen are dialled, those that dial are waited for."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from sky_monarch.actors import runtime as _runtime
from sky_monarch.actors.extent import Extent
from sky_monarch.actors.host_mesh import HostMesh
from sky_monarch.actors.keys import CLIENT, HOST, ActorKeys
from sky_monarch.actors.places import Places
from sky_monarch.actors.region import Region
from sky_monarch.errors import ConfigError, LaunchError, SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sky_monarch._core import ActorGateway
    from sky_monarch.actors.far_host import FarHost
    from sky_monarch.actors.runtime import Runtime

__all__ = ["HostListener", "Launched", "attach_to_hosts", "let_go"]

_EVENT_S = 3600.0
_MOST_HOSTS = 4096
#: Of one try to dial a lost host again.
_AGAIN_S = 2.0


class Launched(Protocol):
    """Hosts that were brought up for this program."""

    def end(self, timeout_s: float) -> None:
        """Take them down and wait for that, so long at the most.

        Raises:
            LaunchError: Some may still bill.
        """


class Door:
    """This program's gateway: made at the first attaching, and one a program."""

    def __init__(self, runtime: Runtime, keys: ActorKeys, listen: str | None) -> None:
        from sky_monarch import __version__
        from sky_monarch._core import ActorGateway

        keys.check(CLIENT)
        self.runtime = runtime
        self.keys = keys
        self.gateway: ActorGateway = ActorGateway(
            runtime.folder,
            runtime.token,
            socket.gethostname(),
            __version__,
            keys.identity,
            hub=True,
            listen=None if listen is None else f"tls:{listen}",
        )
        self.changed = threading.Condition()
        self.arrived: list[tuple[str, str]] = []
        self.addresses: dict[str, str | None] = {}
        #: Where hosts were dialled, lost ones too.
        self.listening: dict[str, str] = {}
        self.closed = False
        #: Names of hosts that whoever has launched them brings up again where they are lost.
        self.expected: set[str] = set()
        #: What was launched together: folders of the hosts, and what ends them.
        self.launched: list[tuple[set[str], Launched]] = []
        self.places = Places(self)
        runtime.attached.hears = True
        runtime.attached.places = self.places
        runtime.handlers["place"] = self.places.asked
        # Where this program is killed, who removes the folder of its sockets is what it spawns with.
        _ = runtime.spawner
        runtime.at_close.append(self.close)
        threading.Thread(target=self._hear, name="sky-monarch-hosts", daemon=True).start()

    def _hear(self) -> None:
        while not self.closed:
            event = self.gateway.event(_EVENT_S)
            if event is None:
                continue
            kind, folder, words, _ = event
            if kind == "joined":
                # Known before anybody can lose it.
                self.runtime.attached.host(folder, words)
                with self.changed:
                    if folder not in self.addresses:
                        self.arrived.append((folder, words))
                        self.changed.notify_all()
            else:
                with self.changed:
                    self.addresses.pop(folder, None)
                    self.arrived[:] = [one for one in self.arrived if one[0] != folder]
                self.runtime.attached.lost(folder, words)

    def take(self, wanted: int, end: float) -> list[tuple[str, str]]:
        """The next hosts that dial in."""
        with self.changed:
            while len(self.arrived) < wanted:
                left = end - time.monotonic()
                if left <= 0:
                    raise LaunchError(
                        f"{len(self.arrived)} of {wanted} hosts have come",
                        hint="is `sky-monarch actor-host --dial` running there, with keys of this program?",
                    )
                self.changed.wait(left)
            taken, self.arrived[:wanted] = self.arrived[:wanted], []
        return taken

    def newcomer(self, name: str) -> FarHost | None:
        """A host that has dialled in and has no place yet: the one of that name, or any."""
        with self.changed:
            found = sorted(self.arrived, key=lambda one: one[1] != name)
            if not found:
                return None
            folder, called = found[0]
            self.arrived.remove(found[0])
            self.addresses[folder] = None
            for folders, _ in self.launched:
                # It was brought up for one of these: they are let go together.
                known = self.runtime.attached.hosts
                if called in {known[one].name for one in folders if one in known}:
                    folders.add(folder)
        self.introduce()
        return self.runtime.attached.host(folder, called)

    def dial_again(self, lost: str) -> FarHost | None:
        """The host that listens where a lost one was dialled: its process waits for the next program."""
        address = self.listening.get(lost)
        if address is None:
            return None
        try:
            folder, name = self.gateway.dial(address, HOST, _AGAIN_S)
        except SkyMonarchError:
            return None
        found = self.runtime.attached.host(folder, name)
        self.dialled(folder, address)
        self.introduce()
        return found

    def dialled(self, folder: str, address: str) -> None:
        """A host is reached there, and nobody waits for it to dial."""
        with self.changed:
            self.listening[folder] = address
            self.addresses[folder] = address
            self.arrived[:] = [one for one in self.arrived if one[0] != folder]

    def introduce(self) -> None:
        """Tell every host how the others are reached."""
        with self.changed:
            routes = [(folder, address) for folder, address in self.addresses.items()]
        replies = [
            host.ask("routes", routes)
            for folder, host in list(self.runtime.attached.hosts.items())
            if folder in self.addresses
        ]
        for one in replies:
            one.wait(10.0)

    def close(self) -> None:
        self.closed = True
        self.gateway.close()


_door: Door | None = None
_lock = threading.Lock()


def _open(keys: ActorKeys, listen: str | None) -> Door:
    global _door
    found = _runtime.runtime()
    with _lock:
        if _door is not None and _door.runtime is found and not _door.closed:
            if _door.keys.identity != keys.identity or (listen is not None and _door.gateway.address is None):
                raise ConfigError(
                    "this program is attached to hosts already, with other keys or without listening",
                    hint="one program has one set of keys; give listen= at the first attaching",
                )
            return _door
        _door = Door(found, keys, listen)
        return _door


def _keys(given: ActorKeys | str | os.PathLike[str] | None) -> ActorKeys:
    if isinstance(given, ActorKeys):
        return given
    if given is not None:
        return ActorKeys.load(given)
    if _door is not None and not _door.closed:
        return _door.keys
    found = ActorKeys.from_environment(os.environ)
    if found is None:
        raise ConfigError(
            "no keys were given", hint="`sky-monarch actor-keys FOLDER` makes them: keys=FOLDER/client.key"
        )
    return found


def attach_to_hosts(
    hosts: Sequence[str],
    *,
    keys: ActorKeys | str | os.PathLike[str] | None = None,
    dim: str = "hosts",
    timeout: float = 60.0,
) -> HostMesh:
    """Attach to hosts where ``sky-monarch actor-host --listen`` runs.

    Args:
        hosts: ``host:port`` of each, in the order of their ranks.
        keys: Of this program: a file that ``sky-monarch actor-keys`` made, or what it holds. By default the
            environment variable ``ACTOR_KEYS``.
        dim: Name of the dimension.
        timeout: Seconds, for all of them.

    Returns:
        The hosts, as a mesh. What was started on them ends with this program.

    Raises:
        ConfigError: An address or the keys cannot be used.
        PeerRefusedError: A host does not know these keys, or runs another version.
        LaunchError: A host did not answer.
    """
    if not hosts or len(hosts) > _MOST_HOSTS or len(set(hosts)) != len(hosts):
        raise ConfigError("hosts is a list of addresses, each of which is there once")
    door = _open(_keys(keys), None)
    end = time.monotonic() + timeout
    found = []
    for host in hosts:
        folder, name = _reach(door.gateway, host, end)
        door.runtime.attached.host(folder, name)
        door.dialled(folder, f"tls:{host}")
        found.append((folder, name))
    door.introduce()
    return HostMesh(Region(Extent([dim], [len(found)])), tuple(found))


def let_go(hosts: Sequence[tuple[str, str]], timeout_s: float) -> None:
    """End all that this program has started on hosts, and hang up on them. See :meth:`HostMesh.stop`."""
    door = _door
    folders = {folder for folder, _ in hosts}
    if door is None or door.closed or not folders <= door.runtime.attached.hosts.keys():
        raise ConfigError(
            f"{', '.join(name for _, name in hosts)}: this program is not attached to them",
            hint="the program's own host ends with shutdown()",
        )
    attached = door.runtime.attached
    # By where they are now: another host may have the place of a lost one.
    going = {attached.hosts[folder].folder for folder in folders}
    launched = [one for one in door.launched if one[0] & (folders | going)]
    for together, _ in launched:
        live = {attached.hosts[folder].folder for folder in together if attached.hosts[folder].gone is None}
        if not live <= going:
            raise ConfigError(
                "these hosts are a part of what was launched together", hint="stop the mesh of all of them"
            )
    for folder in going:
        attached.hosts[folder].let_go()
        door.gateway.drop_host(folder, "this program has let it go")
    for one in launched:
        door.launched.remove(one)
    end = time.monotonic() + timeout_s
    for _, job in launched:
        job.end(max(0.0, end - time.monotonic()))


def _reach(gateway: ActorGateway, host: str, end: float) -> tuple[str, str]:
    from sky_monarch.errors import ChannelClosedError, ChannelTimeoutError, SystemCallError

    pause_s = 0.05
    while True:
        try:
            return gateway.dial(f"tls:{host}", HOST, max(0.1, min(10.0, end - time.monotonic())))
        except (ChannelClosedError, ChannelTimeoutError, SystemCallError) as error:
            # It may still be starting.
            if time.monotonic() + pause_s > end:
                raise LaunchError(
                    f"{host} does not answer: {error}",
                    hint="is `sky-monarch actor-host --listen` running there, and the port open?",
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


class HostListener:
    """Waits for hosts that dial this program: ``sky-monarch actor-host --dial HOST:PORT``.

    Args:
        listen: ``host:port``; port 0 lets the system choose.
        keys: As for :func:`attach_to_hosts`.

    Raises:
        ConfigError: The address or the keys cannot be used, or this program listens already.
        SystemCallError: Somebody else listens there.
    """

    def __init__(self, listen: str, *, keys: ActorKeys | str | os.PathLike[str] | None = None) -> None:
        self._door = _open(_keys(keys), listen)

    @property
    def address(self) -> str:
        """``host:port`` where it listens."""
        address = self._door.gateway.address
        assert address is not None  # noqa: S101  (it was made to listen)
        return address.removeprefix("tls:")

    def launched(self, mesh: HostMesh, job: Launched) -> None:
        """These hosts were brought up for this program: they come back where they are lost, and go with ``job``."""
        with self._door.changed:
            self._door.expected.update(mesh.names)
            self._door.launched.append(({folder for folder, _ in mesh._known()}, job))

    def hosts(self, count: int, *, dim: str = "hosts", timeout: float = 60.0) -> HostMesh:
        """The next ``count`` hosts that dial, as a mesh, in the order of their names.

        Raises:
            ConfigError: ``count`` is not positive.
            LaunchError: They have not all come within ``timeout`` seconds.
        """
        if not 1 <= count <= _MOST_HOSTS:
            raise ConfigError(f"{count} hosts", hint=f"from 1 to {_MOST_HOSTS}")
        taken = sorted(self._door.take(count, time.monotonic() + timeout), key=lambda one: (one[1], one[0]))
        with self._door.changed:
            self._door.addresses.update(dict.fromkeys((folder for folder, _ in taken), None))
        self._door.introduce()
        return HostMesh(Region(Extent([dim], [count])), tuple(taken))
