"""The hosts that this process knows beside its own, and where its processes are started and ended."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from sky_monarch.actors.far_host import FarHost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sky_monarch.actors.runtime import Runtime
    from sky_monarch.actors.spawner import Proc

__all__ = ["Attached"]


class Attached:
    """One a process. A host is known by the folder of its sockets."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.hosts: dict[str, FarHost] = {}
        #: Whether this process is told where a host is lost.
        self.hears = False
        self.lock = threading.Lock()

    def host(self, folder: str, name: str) -> FarHost | None:
        """The host ``folder``; None where that is this process's own."""
        if folder == self.runtime.folder:
            return None
        with self.lock:
            found = self.hosts.get(folder)
            if found is None:
                found = self.hosts[folder] = FarHost(self.runtime, folder, name)
            return found

    def of(self, proc: Proc) -> FarHost | None:
        """The host of a process; None where that is this process's own."""
        folder = os.path.dirname(proc.address)  # noqa: PTH120
        return None if folder == self.runtime.folder else self.host(folder, folder)

    def _by_host(self, procs: Iterable[Proc]) -> dict[FarHost | None, list[Proc]]:
        found: dict[FarHost | None, list[Proc]] = {}
        for proc in procs:
            found.setdefault(self.of(proc), []).append(proc)
        return found

    def check(self, procs: Iterable[Proc]) -> None:
        """Raise :class:`LaunchError` where a host of these processes is lost."""
        for host in self._by_host(procs):
            if host is not None:
                host.check()

    def start(self, procs: list[Proc], spares: Sequence[Proc] = ()) -> None:
        """Start processes, on all their hosts at the same time. They can be dialled afterwards.

        Args:
            procs: Those that are wanted.
            spares: Processes of this host that stand by, for the first of its own among them.

        Raises:
            LaunchError: A host is lost, or could not start them.
        """
        by_host = self._by_host(procs)
        self.check(procs)
        begun = [(host, host.begin(some)) for host, some in by_host.items() if host is not None]
        if None in by_host:
            self.runtime.spawner.start(by_host[None], spares)
        for host, replies in begun:
            host.settle(replies)

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

    def lost(self, folder: str, reason: str) -> None:
        """A host is lost."""
        with self.lock:
            host = self.hosts.get(folder)
        if host is not None:
            host.lost(reason)
