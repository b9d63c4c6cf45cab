"""One program on every rank of a mesh: how its processes are made ranks, and run a function together."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sky_monarch.actors.elastic import Membership, Rank, Runner
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.future import Future
    from sky_monarch.actors.proc_mesh import ProcMesh
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["ranks_of", "run", "setup_torch_elastic_env"]

R = TypeVar("R")
#: For processes to start, and to say where they are.
_READY_S = 120.0
#: Meshes whose helpers are remembered; there are more only where a program makes ever new parts.
_MOST_KNOWN = 256


@dataclass(slots=True)
class _Ranks:
    """The actors in the processes of one mesh that make them ranks.

    Attributes:
        rank: Of :class:`Rank`.
        runner: Of :class:`Runner`.
        generation: Of the next set-up.
    """

    rank: Rank
    runner: Runner
    generation: int = 0


_known: dict[tuple[str, ...], _Ranks] = {}
_lock = threading.Lock()


def ranks_of(mesh: ProcMesh) -> _Ranks:
    """The helpers of ``mesh``, spawned when they are first needed."""
    addresses = tuple(mesh._addresses_of())
    with _lock:
        found = _known.get(addresses)
        if found is None:
            if len(_known) >= _MOST_KNOWN:
                del _known[next(iter(_known))]
            name = f"{mesh.name}.spmd"
            found = _known[addresses] = _Ranks(mesh.spawn(name, Rank), mesh.spawn(name, Runner))
        return found


def setup_torch_elastic_env(
    mesh: ProcMesh | ActorMesh | Any,
    master_addr: str | None = None,
    master_port: int = 0,
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = _READY_S,
) -> None:
    """Make the processes of a mesh ranks of one world: as torchrun's, their environment says all.

    To be called again after ``respawn``: each call is a new generation with a store of its own, in which
    ``init_process_group`` forms the group anew, on the ranks that went on as well as on the new ones.

    Args:
        mesh: Of processes, or of actors.
        master_addr: Where they meet, an address of the host of rank 0; by default its own in the run, or loopback.
        master_port: By default a free one.
        env: Further variables; None takes one away.
        timeout: Seconds, for all of it.

    Raises:
        ConfigError: It cannot be listened there.
        SupervisionError: A process is dead.
        TimeoutError: A process did not answer in time.
    """
    from sky_monarch.actors.actor_mesh import ActorMesh

    procs = mesh._procs() if isinstance(mesh, ActorMesh) else mesh
    form(procs, master=(master_addr, master_port), env=env or {}, timeout=timeout)


def form(
    mesh: ProcMesh, *, master: tuple[str | None, int], env: Mapping[str, str | None], timeout: float
) -> None:
    """Set ``mesh`` up anew."""
    ranks = ranks_of(mesh)
    places = ranks.rank.place.call().get(timeout)
    hosts = tuple(host for host, _ in places.values())
    if len(set(hosts)) > 1 and master[0] is None:
        _check_reachable(mesh)
    first: Any = ranks.rank
    found = first._one(0).listen.call_one(*master).get(timeout)
    membership = Membership(
        key=os.urandom(8).hex(),
        generation=ranks.generation,
        extent=mesh.extent,
        addresses=tuple(mesh._addresses_of()),
        hosts=hosts,
        master=found,
        more=dict(env),
    )
    ranks.generation += 1
    ranks.rank.join.call(membership).get(timeout)


def _check_reachable(mesh: ProcMesh) -> None:
    if not os.environ.get("SKY_MONARCH_ADDRESS"):
        raise ConfigError(
            f"the processes of {mesh.name} are on several hosts, and nothing says how they reach rank 0",
            hint="setup_torch_elastic_env(mesh, master_addr=…), with an address of the host of rank 0",
        )


def is_formed(mesh: ProcMesh, timeout: float = _READY_S) -> bool:
    """Whether its processes, and no others, are ranks of one set-up: not where one of them was replaced since."""
    said = [found for _, found in ranks_of(mesh).rank.place.call().get(timeout).values()]
    key = said[0] and said[0][0]
    return key is not None and said == [(key, rank, len(said)) for rank in range(len(said))]


def run(
    mesh: ProcMesh, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[ValueMesh[R]]:
    """Run ``fn`` on every rank of ``mesh``, which is set up first where it is not."""
    if not callable(fn):
        raise ConfigError(f"spmd runs a function, not {fn!r}")
    if not is_formed(mesh):
        form(mesh, master=(None, 0), env={}, timeout=_READY_S)
    runner: Any = ranks_of(mesh).runner
    # In the shape of this mesh, which is what current_rank() is to say.
    found: Future[ValueMesh[R]] = runner._with_region(mesh._region).run.call(fn, args, kwargs)
    return found
