"""A mesh of actors, as its callers hold it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from sky_monarch.actors import serial
from sky_monarch.actors.context import place_of
from sky_monarch.actors.future import Future
from sky_monarch.actors.hosting import STOP
from sky_monarch.actors.runtime import runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import ConfigError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sky_monarch._core import ActorReplies, ActorTargets
    from sky_monarch.actors.actor import Actor
    from sky_monarch.actors.failure import MeshFailure
    from sky_monarch.actors.future import Answer
    from sky_monarch.actors.host_mesh import HostMesh
    from sky_monarch.actors.proc_mesh import ProcMesh
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["ActorMesh"]

R = TypeVar("R")


class ActorMesh(Shaped):
    """Actors of one class, one a process. Its endpoints are attributes; it may be sent to other actors.

    Raises:
        AttributeError: Of an attribute that is no endpoint of the class.
    """

    def __init__(
        self,
        name: str,
        cls: type[Actor],
        actor_id: int,
        addresses: tuple[str, ...],
        home: Region,
        region: Region,
        spawner: str,
    ) -> None:
        self._name = name
        self._cls = cls
        self._actor_id = actor_id
        self._addresses = addresses
        self._home = home
        self.__region = region
        #: Address of the process that has spawned it.
        self._spawner = spawner
        self._announced = False
        self._prepared: ActorTargets | None = None
        self._made: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name that it was given."""
        return self._name

    @property
    def initialized(self) -> Future[None]:
        """Done when every actor of it is made.

        Raises:
            ConfigError: It was spawned by another process.
        """
        if self._made is None:
            raise ConfigError(f"{self.name} was not spawned by this process")
        return self._made

    def respawn(
        self, ranks: int | Iterable[int], timeout: float = 60.0, *, host: HostMesh | None = None
    ) -> None:
        """Replace the process of a rank, dead or alive, and all its actors; then the whole mesh answers again.

        Where the host of a rank is lost, another one takes its place first, for all meshes that had processes there:
        ``host``, or one that has come anew (hosts that ``launch_hosts`` brought up are had again, and waited for until
        ``timeout``). Else its ranks are spread over the attached ones that have room, fewest processes first.

        Args:
            ranks: Position in this mesh, or several: they are replaced at once.
            timeout: Seconds, until its actors are made.
            host: The host that takes the place of a lost one, whether it has room or not: a mesh of one.

        Raises:
            ConfigError: The processes were started by another process, or ``host`` cannot be used.
            NoCapacityError: The host of a rank is lost, and the others have no room for all.
            LaunchError: ``host`` is lost, too.
            SupervisionError: It could not be done in that time.
        """
        self._procs().respawn(ranks, timeout, host=host)

    def stop(self) -> Future[None]:
        """End its actors after the messages that wait. Their processes go on."""
        replies = self._call(self._targets(), STOP, serial.dump_call((), {}))
        return Future(replies, _all_stopped, self, "stop")

    # --- its processes ---------------------------------------------------------------------------------

    def spmd(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[ValueMesh[R]]:
        """Run a function in each of its processes, one rank each. See :meth:`ProcMesh.spmd`."""
        return self._procs().spmd(fn, *args, **kwargs)

    def device_mesh(self, device_type: str | None = None) -> Any:
        """Torch's ``DeviceMesh`` of its processes, in one of them. See :meth:`ProcMesh.device_mesh`."""
        return self._procs().device_mesh(device_type)

    def stacks(self, rank: int, timeout: float = 5.0) -> str:
        """What the threads of the process of ``rank`` are doing. See :meth:`ProcMesh.stacks`."""
        return self._procs().stacks(rank, timeout)

    # --- dimensions ----------------------------------------------------------------------------------

    @property
    def _region(self) -> Region:
        return self.__region

    def _with_region(self, region: Region) -> ActorMesh:
        part = type(self)(
            self._name, self._cls, self._actor_id, self._addresses, self._home, region, self._spawner
        )
        part._made = self._made
        return part

    # --- calls ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Found once; from then on it is an attribute like any other.
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._cls._endpoints.get(name)
        if found is None:
            known = ", ".join(sorted(self._cls._endpoints)) or "none"
            raise AttributeError(f"{self._cls.__name__} has no endpoint {name!r}; its endpoints: {known}")
        bound = found.of(self)
        self.__dict__[name] = bound
        return bound

    def _targets(self) -> ActorTargets:
        if self._prepared is None:
            if not self._announced:
                # A process without the actor asks its spawner whether it is on its way.
                self._announced = True
                return self._placed(f"\t{self._spawner}")
            self._prepared = self._placed("")
        return self._prepared

    def _placed(self, behind: str) -> ActorTargets:
        from sky_monarch._core import ActorTargets

        extent = self.__region.extent
        whole = self.__region == self._home
        return ActorTargets(
            [
                (self._addresses[rank], ("" if whole else place_of(position, extent)) + behind)
                for position, rank in enumerate(self.__region)
            ]
        )

    def _procs(self) -> ProcMesh:
        from sky_monarch.actors.proc_mesh import ProcMesh

        return ProcMesh(self._name, self._addresses, self.__region)

    def _doings(self) -> str:
        """What its actors are doing, for the text of an error."""
        from sky_monarch.actors import care

        return care.doings(self, runtime())

    def _addresses_of(self) -> list[str]:
        return [self._addresses[rank] for rank in self.__region]

    def _rank_at(self, address: str) -> int | None:
        """Base rank of the actor in the process at ``address``; None where that has none of this mesh."""
        # By its name there, which no two processes have: it may be on another host than at first.
        name = os.path.basename(address)  # noqa: PTH119
        return next((rank for rank in self.__region if os.path.basename(self._addresses[rank]) == name), None)  # noqa: PTH119

    def _one(self, position: int) -> ActorMesh:
        from sky_monarch.actors.extent import Extent
        from sky_monarch.actors.region import Region

        return self._with_region(Region(Extent((), ()), self.__region[position], ()))

    def _call(
        self, targets: ActorTargets, method: str, payload: serial.Body, *, each: bool = False
    ) -> ActorReplies:
        return runtime().node.call(targets, self._actor_id, method, *payload, each)

    def _send(self, targets: ActorTargets, method: str, payload: serial.Body) -> None:
        lost = runtime().node.send(targets, self._actor_id, method, *payload)
        if lost:
            slot, why = lost[0]
            raise SupervisionError(f"{self.name}[{self._rank_of(slot)}] is dead: {why}")

    def _rank_of(self, slot: int) -> int:
        return self.__region[slot]

    def _failure_at(self, slot: int, since: float, deadline: float) -> MeshFailure | None:
        from sky_monarch.actors.proc_mesh import find_owner

        owned = find_owner(self._addresses)
        return None if owned is None else owned.failure_of(self.__region[slot], since, deadline)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMesh, (
            self._name,
            self._cls,
            self._actor_id,
            self._addresses,
            self._home,
            self.__region,
            self._spawner,
        )

    def __repr__(self) -> str:
        return f"<{self._cls.__name__} mesh {self._name!r} {dict(self.sizes)}>"


def _all_stopped(answers: list[Answer], mesh: ActorMesh, method: str) -> None:
    """An actor that is gone already has stopped, too."""
