"""A mesh of processes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sky_monarch.actors import serial
from sky_monarch.actors.actor import Actor
from sky_monarch.actors.actor_mesh import ActorMesh
from sky_monarch.actors.context import current, place_of
from sky_monarch.actors.future import Future, mesh_of
from sky_monarch.actors.runtime import CONTROL, runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sky_monarch.actors.future import Answer
    from sky_monarch.actors.owned import Owned
    from sky_monarch.actors.region import Region

__all__ = ["ProcMesh"]

A = TypeVar("A", bound=Actor)
_STOP_S = 5.0
_owned: dict[tuple[str, ...], Owned] = {}


def find_owner(addresses: tuple[str, ...]) -> Owned | None:
    """What this process knows of the processes at ``addresses``, where it has started them."""
    return _owned.get(addresses)


def owner_of(addresses: tuple[str, ...], name: str) -> Owned:
    """The same.

    Raises:
        ConfigError: Another process has started them.
    """
    found = _owned.get(addresses)
    if found is None:
        raise ConfigError(
            f"the processes of {name} were started by another process",
            hint="ask the actor that has spawned them",
        )
    return found


def ranks_of(region: Region, positions: int | Iterable[int]) -> list[int]:
    """Base ranks of one or several positions, each once.

    Raises:
        IndexError: There is no such position.
    """
    chosen = [positions] if isinstance(positions, int) else positions
    return sorted({region[position] for position in chosen})


def who_spawns() -> tuple[str, int]:
    """Address and number of the actor whose code runs; number 0 outside of actors."""
    hosted = current.get().hosted
    return runtime().address, CONTROL if hosted is None else hosted.actor_id


class ProcMesh(Shaped):
    """Processes in named dimensions, on which meshes of actors are spawned."""

    def __init__(self, name: str, addresses: tuple[str, ...], region: Region) -> None:
        self._name = name
        self._addresses = addresses
        self.__region = region

    @property
    def name(self) -> str:
        """The name that it was given."""
        return self._name

    def spawn(self, name: str, cls: type[A], *args: Any, **kwargs: Any) -> A:
        """Make one actor in each process. Returns at once; a call waits until its actor is made.

        Args:
            name: Of the mesh, for errors and logs.
            cls: Subclass of :class:`Actor`.
            args: Of its constructor.
            kwargs: The same.

        Returns:
            The mesh of actors. Type checkers see it as ``cls``, whose endpoints it has.

        Raises:
            ConfigError: ``cls`` is no actor.
        """
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise ConfigError(f"{cls!r} is no subclass of Actor", hint="class Trainer(Actor): …")
        from sky_monarch._core import ActorTargets

        actor_id = int.from_bytes(os.urandom(7), "big") + 1
        body = serial.dump_whole((actor_id, name, who_spawns(), serial.dump_whole((cls, args, kwargs))))
        extent = self.__region.extent
        targets = [
            (self._addresses[rank], place_of(position, extent)) for position, rank in enumerate(self.__region)
        ]
        mesh = ActorMesh(name, cls, actor_id, self._addresses, self.__region, self.__region)
        owned = find_owner(self._addresses)
        if owned is not None:
            from sky_monarch.actors.owned import Record

            owned.record(Record(name, actor_id, body, self.__region), cls)
        replies = runtime().node.call(ActorTargets(targets), CONTROL, "spawn", body)
        mesh._made = Future(replies, _none_of, mesh, "__init__")
        return cast("A", mesh)

    def respawn(self, ranks: int | Iterable[int], timeout: float = 60.0) -> None:
        """Replace the processes of ``ranks``, one or several, at once. See :meth:`ActorMesh.respawn`."""
        owner_of(self._addresses, self.name).respawn(ranks_of(self.__region, ranks), timeout)

    def pids(self) -> list[int | None]:
        """Process ids, by rank; None of one that is not forked yet.

        Raises:
            ConfigError: Another process has started them.
        """
        owned = owner_of(self._addresses, self.name)
        return [owned.procs[rank].pid for rank in self.__region]

    def stop(self, timeout: float = _STOP_S) -> Future[None]:
        """End its processes: actors first, after what waits for them. ``get()`` kills those that take longer."""
        from sky_monarch._core import ActorTargets

        owned = owner_of(self._addresses, self.name)
        owned.stopped = True
        owned.spares.close()
        targets = ActorTargets([(self._addresses[rank], "") for rank in self.__region])
        replies = runtime().node.call(targets, CONTROL, "exit", serial.dump_whole(timeout))
        end = time.monotonic() + timeout
        stopping = [owned.procs[rank] for rank in self.__region]

        def settle(*_: object) -> None:
            for proc in stopping:
                proc.ended.wait(max(0.0, end - time.monotonic()))
            owned.runtime.attached.kill(stopping)
            for proc in stopping:
                proc.ended.wait(_STOP_S)

        return Future(replies, settle, cast("ActorMesh", self), "stop")

    def __enter__(self) -> ProcMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop().get(2 * _STOP_S)

    @property
    def _region(self) -> Region:
        return self.__region

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(self._name, self._addresses, region)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcMesh, (self._name, self._addresses, self.__region)

    def __repr__(self) -> str:
        return f"<ProcMesh {self._name!r} {dict(self.sizes)}>"


def _none_of(answers: list[Answer], mesh: ActorMesh, method: str) -> None:
    mesh_of(answers, mesh, method)
