"""The hosts that this process knows beside its own, and where its processes are started and ended."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.far_host import SERVER, FarHost, Standby
from sky_monarch.actors.future import VALUE
from sky_monarch.errors import LaunchError, NoCapacityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sky_monarch.actors.places import Places
    from sky_monarch.actors.runtime import Runtime
    from sky_monarch.actors.spawner import Proc

__all__ = ["Attached"]

#: The program has so long to answer, beyond what it waits for.
_ANSWER_S = 10.0


class Attached:
    """One a process. A host is known by the folder of its sockets."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.hosts: dict[str, FarHost] = {}
        #: Whether this process is told where a host is lost.
        self.hears = False
        #: In the program itself, where it is attached to hosts.
        self.places: Places | None = None
        #: Lost hosts whose place this process's own has.
        self.own: set[str] = set()
        self.lock = threading.Lock()

    def host(self, folder: str, name: str) -> FarHost | None:
        """The host ``folder``; None where that is this process's own."""
        if folder == self.runtime.folder:
            return None
        with self.lock:
            if folder in self.own:
                return None
            found = self.hosts.get(folder)
            if found is None:
                found = self.hosts[folder] = FarHost(self.runtime, folder, name)
            return found

    def at(self, address: str) -> FarHost | None:
        """The host that a process with that address is first started on; None where that is this process's own."""
        folder = os.path.dirname(address)  # noqa: PTH120
        return self.host(folder, folder)

    def _by_host(self, procs: Iterable[Proc]) -> dict[FarHost | None, list[Proc]]:
        found: dict[FarHost | None, list[Proc]] = {}
        for proc in procs:
            found.setdefault(proc.place, []).append(proc)
        return found

    def check(self, procs: Iterable[Proc]) -> None:
        """Raise :class:`LaunchError` where a host of these processes is lost."""
        for host in self._by_host(procs):
            if host is not None:
                host.check()

    def find_places(self, procs: list[Proc], each: int, wanted: str | None, end: float) -> None:
        """See to it that the hosts of these processes live: those of a lost one have places on others from here on.

        Args:
            procs: That were started there.
            each: Processes that a host of their mesh has room for.
            wanted: Folder of the host that is to have them; None for any that have room.
            end: When to give up, by ``time.monotonic()``.

        Raises:
            NoCapacityError: The hosts have no room for all of them.
            LaunchError: The program, or the host that is wanted, is lost.
            ConfigError: Another one than the one that is wanted has the place.
        """
        for host, some in self._by_host(procs).items():
            if host is None or host.gone is None:
                continue
            addresses = [proc.address for proc in some]
            if self.places is not None:
                _, found = self.places.find(host.folder, addresses, each, wanted, end)
            else:
                found = self._ask_for_places(host, (addresses, each, wanted), end)
            for proc, where in zip(some, found, strict=True):
                proc.place = self._reached(*where)

    def _reached(self, folder: str, name: str) -> FarHost | None:
        """A host that the program says is there, though this process may have lost its way to it before."""
        found = self.host(folder, name)
        if found is not None and found.gone is not None:
            self.replace(found, FarHost(self.runtime, folder, name))
            found = self.host(folder, name)
        return found

    def _ask_for_places(
        self, host: FarHost, what: tuple[list[str], int, str | None], end: float
    ) -> list[tuple[str, str]]:
        from sky_monarch._core import ActorTargets

        # Who serves this host knows the program; on the program's own host that is asked itself.
        at = f"{self.runtime.folder}/{SERVER}"
        at = at if os.path.exists(at) else f"{self.runtime.folder}/client"  # noqa: PTH110
        left_s = max(0.0, end - time.monotonic())
        body = serial.dumps((self.runtime.address, host.folder, host.name, *what, left_s))
        replies = self.runtime.node.call(ActorTargets([(at, "")]), 0, "place", *body)
        if not replies.wait(left_s + _ANSWER_S):
            raise LaunchError(f"the program does not say who has the place of {host.name}")
        (_, kind, body, buffers) = replies.take()[0]
        if kind != VALUE:
            why = body if kind < 0 else serial.loads(body, buffers).words
            raise NoCapacityError(f"nothing can be started in place of {host.name}: {why}")
        (folder, name), found = serial.loads(body, buffers)
        if folder != host.folder:
            self.replace(host, self._reached(folder, name))
        # Else only the way from here to it was lost, and with it all that this process had there.
        return list(found)

    def replace(self, lost: FarHost, by: FarHost | None) -> None:
        """What is asked of a lost host is asked of ``by``; None: this process's own host has its place."""
        with self.lock:
            for folder in [folder for folder, host in self.hosts.items() if host is lost]:
                if by is None:
                    del self.hosts[folder]
                    self.own.add(folder)
                else:
                    self.hosts[folder] = by

    def start(self, procs: list[Proc], spares: Sequence[Proc] = (), standby: Standby | None = None) -> None:
        """Start processes, on all their hosts at the same time. They can be dialled afterwards.

        Args:
            procs: Those that are wanted.
            spares: Processes of this host that stand by, for the first of its own among them.
            standby: What stands by for their mesh on each other host.

        Raises:
            LaunchError: A host is lost, or could not start them.
        """
        by_host = self._by_host(procs)
        self.check(procs)
        begun = [(host, host.begin(some, standby)) for host, some in by_host.items() if host is not None]
        if None in by_host:
            for proc in by_host[None]:
                # It may have run on a host whose place this one has.
                proc.address = f"{self.runtime.folder}/{os.path.basename(proc.address)}"  # noqa: PTH119
            self.runtime.spawner.start(by_host[None], spares)
        for host, replies in begun:
            host.settle(replies)

    def tell(self, procs: Iterable[Proc], method: str, *args: Any) -> None:
        """Ask something of the other hosts of these processes, and wait for no answer."""
        for host in self._by_host(procs):
            if host is not None and host.gone is None:
                host.ask(method, *args)

    def kill(self, procs: list[Proc]) -> None:
        """Kill processes; their ends are heard of as always.

        Raises:
            LaunchError: What starts processes here is gone.
        """
        for host, some in self._by_host(procs).items():
            if host is None:
                self.runtime.spawner.kill(some)
            else:
                host.kill(some)

    def kill_late(self, procs: list[Proc]) -> None:
        """Kill those of them that have not ended by now, which nobody may wait for."""
        with suppress(LaunchError):  # those of a starter that is gone are gone with it
            self.kill(procs)

    def lost(self, folder: str, reason: str) -> None:
        """A host is lost."""
        with self.lock:
            host = self.hosts.get(folder)
        if host is not None:
            host.lost(reason)
