"""Replica groups that are actors: each trains in a fault-tolerant session, and comes back when it has failed."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from sky_monarch.actors import spmd
from sky_monarch.actors.lighthouse import Lighthouse
from sky_monarch.actors.value_mesh import ValueMesh
from sky_monarch.errors import (
    ActorError,
    ChannelError,
    ConfigError,
    RestartsExhaustedError,
    SkyMonarchError,
    SupervisionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.endpoint import Endpoint
    from sky_monarch.actors.extent import Point

__all__ = ["ReplicaGroups"]

R = TypeVar("R")
_READY_S = 120.0
_RESPAWN_S = 60.0


class ReplicaGroups:
    """The groups of a mesh of actors along one dimension, each of them a replica of the same model.

    Their endpoint trains in a :class:`sky_monarch.training.Session`, which finds in its environment what it needs. A
    group of which a process dies, or whose endpoint raises, is replaced as a whole, in its place: it joins the others
    again and heals from one of them. The others train on meanwhile, and leave at their last step: one that comes later
    finds nobody to heal from, so a group that fails when all others have come to their ends is not started again.

    Args:
        mesh: Of actors. All ranks with the same index along ``dim`` are one group.
        lighthouse: One of the program's own, or the address of TorchFT's: ``http://host:port``.
        dim: Name of the dimension.
        min_replicas: As the session is told; by default the lighthouse's own.
        restarts: Of each group, at the most.
        env: Further variables for all ranks.

    Raises:
        ConfigError: There is no such dimension, or a number cannot be used.
    """

    def __init__(
        self,
        mesh: Any,
        lighthouse: Lighthouse | str,
        *,
        dim: str = "replicas",
        min_replicas: int | None = None,
        restarts: int = 3,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if dim not in mesh.extent:
            raise ConfigError(f"the mesh has no dimension {dim!r}", hint=f"it has {mesh.extent!r}")
        if restarts < 0:
            raise ConfigError(f"restarts is {restarts}; it must be at least 0")
        self._mesh: ActorMesh = mesh
        self._lighthouse = lighthouse
        self._dim = dim
        self._restarts = restarts
        self._env = dict(env or {})
        known = lighthouse.min_replicas if isinstance(lighthouse, Lighthouse) else 1
        self._min_replicas = known if min_replicas is None else min_replicas
        self._generations = [0] * mesh.size(dim)
        self._ended: set[int] = set()

    @property
    def generations(self) -> tuple[int, ...]:
        """Of each group, how often it was started."""
        return tuple(self._generations)

    def group(self, replica: int) -> Any:
        """The actors of one group."""
        return self._mesh.slice(**{self._dim: replica})

    def run(self, endpoint: Endpoint[..., R], /, *args: Any, **kwargs: Any) -> ValueMesh[R]:
        """Call an endpoint of all groups, and see to it that each of them comes to its end.

        Args:
            endpoint: Of the mesh: ``trainers.train``.
            args: Of it.
            kwargs: Of it.

        Returns:
            What it returned on each rank, of the generation that came to its end.

        Raises:
            RestartsExhaustedError: A group has failed once more than it may, or when there was nobody left to heal
                from. The cause is its last failure; the others have come to their ends.
            TypeError: The endpoint does not take these arguments.
        """
        endpoint._known_signature.check(endpoint.__name__, args, kwargs)
        self._ended.clear()
        results: dict[int, ValueMesh[R]] = {}
        failures: dict[int, Exception] = {}

        def keep(replica: int) -> None:
            try:
                results[replica] = self._keep(replica, endpoint.__name__, args, kwargs)
            except (SkyMonarchError, TimeoutError) as error:
                failures[replica] = error

        threads = [
            threading.Thread(target=keep, args=(replica,), name=f"replica-{replica}", daemon=True)
            for replica in range(len(self._generations))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for replica, error in sorted(failures.items()):
            raise RestartsExhaustedError(
                f"group {replica} has failed {self._generations[replica]} times; {self._restarts} restarts are allowed"
            ) from error
        extent = self._mesh.extent
        return ValueMesh(extent, [self._of(results, point) for point in extent.points()])

    def _of(self, results: dict[int, ValueMesh[R]], point: Point) -> R:
        """The result at a place of the whole mesh."""
        place = dict(point)
        return results[place.pop(self._dim)].item(**place)

    def _keep(self, replica: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueMesh[Any]:
        """Have a group work to its end, over its restarts."""
        for left in range(self._restarts, -1, -1):
            self._generations[replica] += 1
            try:
                self._begin(replica)
                found: ValueMesh[Any] = getattr(self.group(replica), name).call(*args, **kwargs).get()
                self._ended.add(replica)
                return found
            except (ActorError, SupervisionError, TimeoutError) as error:
                self._evict(replica)
                if not left:
                    raise
                if len(self._generations) > 1 and len(self._ended) == len(self._generations) - 1:
                    error.add_note("all other groups have come to their ends: nobody is left to heal from")
                    raise
                sys.stderr.write(
                    f"sky-monarch: group {replica} is replaced, {left} restarts are left: {error}\n"
                )
                self._replace(replica)
        raise AssertionError("unreachable")

    def _begin(self, replica: int) -> None:
        """Tell the processes of a group who they are."""
        generation = self._generations[replica]
        lighthouse = self._lighthouse
        ours = isinstance(lighthouse, Lighthouse)
        address = lighthouse if isinstance(lighthouse, str) else lighthouse.address(replica, generation)
        env: dict[str, str | None] = {
            "TORCHFT_LIGHTHOUSE": address,
            "SKY_MONARCH_LIGHTHOUSE_KIND": "sky-monarch" if ours else "torchft",
            "REPLICA_GROUP_ID": str(replica),
            "NUM_REPLICA_GROUPS": str(len(self._generations)),
            "SKY_MONARCH_REPLICA": str(replica),
            "SKY_MONARCH_REPLICAS": str(len(self._generations)),
            "SKY_MONARCH_MIN_REPLICAS": str(self._min_replicas),
            "SKY_MONARCH_GENERATION": str(generation),
            # Of the program itself, where that is a rank of a job: these are not its ranks.
            "SKY_MONARCH_RANK": None,
            "SKY_MONARCH_AGENT": None,
            "SKY_MONARCH_CHECKPOINT": None,
            **self._env,
        }
        spmd.form(self.group(replica)._procs(), master=(None, 0), env=env, timeout=_READY_S)

    def _evict(self, replica: int) -> None:
        """Let the others not wait for what is dead. Where that fails, its silence tells them."""
        if isinstance(self._lighthouse, Lighthouse):
            try:
                self._lighthouse.evict(replica, self._generations[replica])
            except ChannelError as error:
                sys.stderr.write(f"sky-monarch: the lighthouse was not told of group {replica}: {error}\n")

    def _replace(self, replica: int) -> None:
        """Fresh processes for all ranks of a group: those that live wait for a peer that is dead."""
        from sky_monarch.actors.proc_mesh import owner_of

        group = self.group(replica)
        owner_of(group._addresses, group.name).respawn(list(group._region), _RESPAWN_S)
