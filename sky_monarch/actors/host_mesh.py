"""Hosts, on which meshes of processes are started, and this process as a mesh of its own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import runtime as _runtime
from sky_monarch.actors.extent import Extent
from sky_monarch.actors.future import Future
from sky_monarch.actors.proc_mesh import ProcMesh, _owned, who_spawns
from sky_monarch.actors.region import Region
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sky_monarch.actors.restarts import RestartPolicy

__all__ = ["HostMesh", "shutdown", "shutdown_context", "this_host", "this_proc"]

_MOST_PROCS = 4096
_MOST_STANDBYS = 64
_STOP_S = 600.0
_numbers = itertools.count(1)


class HostMesh(Shaped):
    """Hosts: this one, ``this_host()``, or others, ``attach_to_hosts([...])``. It may be sent to actors.

    Args:
        region: Which of them.
        hosts: Folder and name of each; None for the host of the process that asks.
    """

    def __init__(self, region: Region, hosts: tuple[tuple[str, str], ...] | None = None) -> None:
        self.__region = region
        self.__hosts = hosts

    @property
    def names(self) -> list[str]:
        """What people call the hosts, by rank."""
        found, attached = self._known(), _runtime.runtime().attached
        hosts = [attached.host(*found[rank]) for rank in self.__region]
        return [
            found[rank][1] if host is None else host.name
            for rank, host in zip(self.__region, hosts, strict=True)
        ]

    def _known(self) -> tuple[tuple[str, str], ...]:
        if self.__hosts is None:
            here = _runtime.runtime()
            return ((here.folder, here.host),)
        return self.__hosts

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        name: str = "procs",
        *,
        restart: RestartPolicy | None = None,
        standby: int = 0,
    ) -> ProcMesh:
        """Start processes. Returns at once; they answer when they are there.

        Args:
            per_host: Dimensions of the processes of one host; one process where there are none.
            name: Of the mesh, for errors and logs.
            restart: What to do when one ends; by default its owner is told, and may ``respawn`` it.
            standby: Processes kept ready on each host to take the place of one that ends, with what its actors need
                imported.

        Raises:
            ConfigError: A size is not positive, or there are too many.
            LaunchError: They could not be started.
        """
        sizes = dict(per_host or {})
        for dim, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"per_host[{dim!r}] is {size!r}", hint="a whole number, 1 or more")
        if sizes.keys() & set(self.extent.labels):
            raise ConfigError(f"per_host has the dimensions of the hosts: {self.extent.labels}")
        extent = self.extent.concat(Extent(list(sizes), list(sizes.values())))
        count = extent.nelements
        if count > _MOST_PROCS:
            raise ConfigError(f"{count} processes; {_MOST_PROCS} are the most")
        if not isinstance(standby, int) or not 0 <= standby <= _MOST_STANDBYS:
            raise ConfigError(f"standby is {standby!r}", hint=f"a whole number, 0 to {_MOST_STANDBYS}")
        from sky_monarch.actors.owned import Owned

        found = _runtime.runtime()
        number = next(_numbers)
        each = count // max(1, len(self))
        known = self._known()
        addresses = tuple(
            f"{found.address_on(*known[self.__region[rank // each]])}-{number}.{rank}"
            for rank in range(count)
        )
        _owned[addresses] = Owned(found, name, addresses, who_spawns(), restart, standby)
        return ProcMesh(name, addresses, Region(extent))

    def stop(self, timeout: float = _STOP_S) -> Future[None]:
        """End all that this program has started on these hosts, and let them go.

        Hosts that were launched (``launch_hosts``) are taken down, and waited for; it is said what they have cost, and
        what may still bill. Leaving a ``with`` block of the mesh does the same.

        Args:
            timeout: Seconds, for hosts that have to be taken down.

        Raises:
            ConfigError: It is this program's own host, or another process is attached to them, or they are a part of
                what was launched together.
            LaunchError: Some may still bill.
        """
        from sky_monarch.actors import attach

        attach.let_go([self._known()[rank] for rank in self.__region], timeout)
        return Future.ready(None)

    def __enter__(self) -> HostMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop().get()

    def _only(self) -> str:
        """The folder of the one host of this mesh.

        Raises:
            ConfigError: There are several.
        """
        if len(self) != 1:
            raise ConfigError(f"host has {len(self)} hosts", hint="a mesh of one: hosts.slice(hosts=1)")
        return self._known()[self.__region[0]][0]

    @property
    def _region(self) -> Region:
        return self.__region

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(region, self.__hosts)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh, (self.__region, self._known())

    def __repr__(self) -> str:
        return f"<HostMesh {dict(self.sizes)}>"


def this_host() -> HostMesh:
    """This host, as a mesh of one."""
    return HostMesh(Region(Extent((), ())))


def this_proc() -> ProcMesh:
    """This process, as a mesh of one: its actors run in threads here."""
    return ProcMesh("this_proc", (_runtime.runtime().address,), Region(Extent((), ())))


def shutdown() -> None:
    """End everything that this program has spawned. Done at its end anyway."""
    _runtime.end()
    _owned.clear()


def shutdown_context() -> Future[None]:
    """The same as :func:`shutdown`, by Monarch's name and with its result: ``shutdown_context().get()``."""
    shutdown()
    return Future.ready(None)
