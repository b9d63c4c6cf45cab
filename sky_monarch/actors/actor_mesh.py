"""A mesh of actors, as its callers hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.context import place_of
from sky_monarch.actors.future import Future
from sky_monarch.actors.hosting import STOP
from sky_monarch.actors.runtime import runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import ConfigError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sky_monarch._core import ActorReplies, ActorTargets
    from sky_monarch.actors.actor import Actor
    from sky_monarch.actors.failure import MeshFailure
    from sky_monarch.actors.future import Answer
    from sky_monarch.actors.region import Region

__all__ = ["ActorMesh"]


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
    ) -> None:
        self._name = name
        self._cls = cls
        self._actor_id = actor_id
        self._addresses = addresses
        self._home = home
        self.__region = region
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

    def respawn(self, ranks: int | Iterable[int], timeout: float = 60.0) -> None:
        """Replace the process of a rank, dead or alive, and all its actors; then the whole mesh answers again.

        Args:
            ranks: Position in this mesh, or several: they are replaced at once.
            timeout: Seconds, until its actors are made.

        Raises:
            ConfigError: The processes were started by another process.
            SupervisionError: It could not be done in that time.
        """
        from sky_monarch.actors.proc_mesh import owner_of, ranks_of

        owner_of(self._addresses, self.name).respawn(ranks_of(self.__region, ranks), timeout)

    def stop(self) -> Future[None]:
        """End its actors after the messages that wait. Their processes go on."""
        replies = self._call(self._targets(), STOP, serial.dump_call((), {}))
        return Future(replies, _all_stopped, self, "stop")

    # --- dimensions ----------------------------------------------------------------------------------

    @property
    def _region(self) -> Region:
        return self.__region

    def _with_region(self, region: Region) -> ActorMesh:
        part = type(self)(self._name, self._cls, self._actor_id, self._addresses, self._home, region)
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
            from sky_monarch._core import ActorTargets

            extent = self.__region.extent
            whole = self.__region == self._home
            self._prepared = ActorTargets(
                [
                    (self._addresses[rank], "" if whole else place_of(position, extent))
                    for position, rank in enumerate(self.__region)
                ]
            )
        return self._prepared

    def _called(self) -> set[str]:
        return {self._addresses[rank] for rank in self.__region}

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

    def _failure_at(self, slot: int, deadline: float) -> MeshFailure | None:
        from sky_monarch.actors.proc_mesh import find_owner

        owned = find_owner(self._addresses)
        return None if owned is None else owned.failure_of(self.__region[slot], deadline)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMesh, (
            self._name,
            self._cls,
            self._actor_id,
            self._addresses,
            self._home,
            self.__region,
        )

    def __repr__(self) -> str:
        return f"<{self._cls.__name__} mesh {self._name!r} {dict(self.sizes)}>"


def _all_stopped(answers: list[Answer], mesh: ActorMesh, method: str) -> None:
    """An actor that is gone already has stopped, too."""
