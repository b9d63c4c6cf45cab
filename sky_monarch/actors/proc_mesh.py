"""A mesh of processes."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sky_monarch.actors import serial
from sky_monarch.actors.actor import Actor
from sky_monarch.actors.actor_mesh import ActorMesh
from sky_monarch.actors.context import current, place_of
from sky_monarch.actors.future import Future, mesh_of
from sky_monarch.actors.runtime import CONTROL, runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import ConfigError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sky_monarch.actors.future import Answer
    from sky_monarch.actors.host_mesh import HostMesh
    from sky_monarch.actors.owned import Owned
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["ProcMesh"]

A = TypeVar("A", bound=Actor)
R = TypeVar("R")
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


def being_replaced(address: str, limit_s: float) -> None:
    """Wait while the process of that name is being replaced by this one and has not been told of its actors.

    Args:
        address: Of the process, wherever it is.
        limit_s: Seconds, at the most.
    """
    name = os.path.basename(address)  # noqa: PTH119
    for owned in list(_owned.values()):
        for rank, proc in enumerate(owned.procs):
            if os.path.basename(proc.address) == name:  # noqa: PTH119
                owned.wait_told(rank, limit_s)
                return


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
        region = self.__region
        mesh = ActorMesh(name, cls, actor_id, self._addresses, region, region, runtime().address)
        owned = find_owner(self._addresses)
        if owned is not None:
            from sky_monarch.actors.owned import Record

            owned.record(Record(name, actor_id, body, self.__region), cls)
        runtime().strays.remember(actor_id, self._addresses)
        replies = runtime().node.call(ActorTargets(targets), CONTROL, "spawn", body)
        mesh._made = Future(replies, _none_of, mesh, "__init__")
        return cast("A", mesh)

    def respawn(
        self, ranks: int | Iterable[int], timeout: float = 60.0, *, host: HostMesh | None = None
    ) -> None:
        """Replace the processes of ``ranks``, one or several, at once. See :meth:`ActorMesh.respawn`."""
        chosen = ranks_of(self.__region, ranks)
        folder = None if host is None else host._only()
        owner_of(self._addresses, self.name).respawn(chosen, timeout, host=folder)

    def pids(self) -> list[int | None]:
        """Process ids, by rank; None of one that is not forked yet.

        Raises:
            ConfigError: Another process has started them.
        """
        owned = owner_of(self._addresses, self.name)
        return [owned.procs[rank].pid for rank in self.__region]

    def spmd(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[ValueMesh[R]]:
        """Run a function in each process, as torchrun runs a script: each is a rank, and its environment says which.

        ``init_process_group()`` of this module meets the others there, ``device_mesh()`` is the mesh for FSDP, tensor
        parallelism and DTensors. Set up once, and anew where a process was replaced since.

        Args:
            fn: Run in a thread; one at a time.
            args: Of it.
            kwargs: Of it.

        Returns:
            What it returned on each rank, on its way.

        Raises:
            ConfigError: It cannot be set up.
            SupervisionError: A process is dead: ``respawn`` it.
        """
        from sky_monarch.actors import spmd

        return spmd.run(self, fn, args, kwargs)

    def device_mesh(self, device_type: str | None = None) -> Any:
        """Torch's ``DeviceMesh`` with these dimensions. Called in its processes, in all of them.

        ``procs.split(gpus=("dp", "tp"), tp=2).device_mesh("cpu")`` has two dimensions.

        Args:
            device_type: ``cpu`` or ``cuda``; by default that of the accelerators, where there are some.

        Raises:
            ConfigError: This process is none of those that were set up together, by ``spmd`` or
                ``setup_torch_elastic_env``.
        """
        from sky_monarch.actors.process_group import mesh_of

        return mesh_of(self.extent, tuple(self._addresses_of()), device_type)

    def stacks(self, rank: int, timeout: float = 5.0) -> str:
        """What the threads and coroutines of a process are doing, however stuck they are.

        Args:
            rank: Position in this mesh.
            timeout: Seconds.

        Raises:
            SupervisionError: It is dead, or stopped, and says nothing.
        """
        from sky_monarch.actors import care

        return care.stacks_of(runtime(), self._addresses, self.__region[rank], self.name, timeout)

    def logging_option(
        self, stream_to_client: bool = True, aggregate_window_sec: float | None = 3.0
    ) -> Future[None]:
        """Say what becomes of what the processes print. Without it each line is shown at once.

        Args:
            stream_to_client: Show it on this program's stderr, each line with mesh and rank.
            aggregate_window_sec: Show lines that differ in numbers only once in so many seconds, with how many there
                were; None for each one at once.

        Raises:
            ConfigError: Another process has started these, or an argument cannot be used.
        """
        owner_of(self._addresses, self.name).log.configure(stream_to_client, aggregate_window_sec)
        return Future.ready(None)

    def debug_option(self, wait_s: float | None = 300.0, timeout: float = 30.0) -> Future[None]:
        """Let ``breakpoint()`` in these processes wait for a debugger; without it, it is passed over.

        Where one is reached, the program prints how to attach: ``sky-monarch debug <socket>``, as this user, on the
        process's host.

        Args:
            wait_s: Seconds until it goes on because nobody came; None switches it off.
            timeout: Seconds, for the processes to answer.

        Raises:
            SupervisionError: One does not answer.
        """
        from sky_monarch.actors import care

        if wait_s is not None and not wait_s > 0:
            raise ConfigError(f"wait_s is {wait_s!r}", hint="a number of seconds above 0, or None")
        addresses = self._addresses_of()
        answered = {slot for slot, _ in care.ask(runtime(), addresses, "breakpoints", wait_s, timeout)}
        silent = [rank for rank in range(len(addresses)) if rank not in answered]
        if silent:
            raise SupervisionError(f"{self.name}[{silent[0]}] does not answer within {timeout} s")
        return Future.ready(None)

    def stop(self, timeout: float = _STOP_S) -> Future[None]:
        """End its processes: actors first, after what waits for them. Those that take longer are killed.

        Args:
            timeout: Seconds that they have for it.
        """
        from sky_monarch._core import ActorTargets

        owned = owner_of(self._addresses, self.name)
        stopping = owned.stop(list(self.__region))
        targets = ActorTargets([(self._addresses[rank], "") for rank in self.__region])
        replies = runtime().node.call(targets, CONTROL, "exit", serial.dump_whole(timeout))
        end = time.monotonic() + timeout
        # Whether anybody waits or not: one that does not answer would be waited for as long as it lives.
        late = threading.Timer(timeout, owned.runtime.attached.kill_late, [stopping])
        late.daemon = True
        late.start()

        def settle(*_: object) -> None:
            for proc in stopping:
                proc.ended.wait(max(0.0, end - time.monotonic()))
            late.cancel()
            owned.runtime.attached.kill(stopping)
            for proc in stopping:
                proc.ended.wait(_STOP_S)

        return Future(replies, settle, cast("ActorMesh", self), "stop")

    def __enter__(self) -> ProcMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop().get(2 * _STOP_S)

    def _addresses_of(self) -> list[str]:
        return [self._addresses[rank] for rank in self.__region]

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
