"""A tensor that lies in the processes of a mesh, as the program that drives them holds it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.layout import Part, parts_of
from sky_monarch.actors.rdma import RDMABuffer
from sky_monarch.actors.tensors import GIVEN, Holder, Placed, Summary, held, of_torch, to_torch
from sky_monarch.errors import ActorError, ConfigError, SkyMonarchError, StaleHandleError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch.actors.future import Future
    from sky_monarch.actors.proc_mesh import ProcMesh

__all__ = ["ShardedTensor"]

#: Reductions, and what torch calls those that work along one dimension as well as along all.
_REDUCTIONS = {"sum": "sum", "mean": "mean", "prod": "prod", "max": "amax", "min": "amin"}
_TIMEOUT_S = 120.0
_MOST_HOLDERS = 256
_holders: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


class ShardedTensor:
    """A handle of a tensor whose parts lie in the processes of a mesh: inside, a ``DTensor`` of each.

    What is done to it is done by all processes together, one thing after the other, in the order in which this program
    says so. They use torch's default process group: actors of the same processes must not use that meanwhile, so wait
    for what they do first. A handle that is sent to an actor gives it the part of its process, by :meth:`dtensor`.

    Made by :meth:`from_full` and :meth:`from_function`. Dropped with its last reference, or by :meth:`drop`.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        holder: Any,
        number: int,
        summary: Summary,
        device_type: str,
        timeout: float,
        *,
        owned: bool = True,
    ) -> None:
        self._mesh, self._holder, self._number = mesh, holder, number
        self._shape, self._dtype, self._placed = summary
        self._device_type, self._timeout = device_type, timeout
        self._finalizer = weakref.finalize(self, _drop, holder, number) if owned else None
        if self._finalizer is not None:
            self._finalizer.atexit = False

    # --- making one ----------------------------------------------------------------------------------

    @classmethod
    def from_full(
        cls, mesh: Any, tensor: Any, placements: Any, *, device_type: str = "cpu", timeout: float = _TIMEOUT_S
    ) -> ShardedTensor:
        """Deal a tensor of this program out. Each process reads its part, and only that, from this one's memory.

        Args:
            mesh: Of processes, or of actors.
            tensor: Of torch; it is copied.
            placements: ``Shard(dim)`` or ``Replicate()`` of ``torch.distributed.tensor``: one for each dimension of the
                mesh, in a sequence, or by name in a mapping, where ``Replicate()`` may be left out.
            device_type: Where the parts are to lie.
            timeout: Seconds, for this and for everything that is done to it later.

        Raises:
            ConfigError: The placements do not fit.
            SupervisionError: A process is dead.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"from_full deals out a tensor of torch, not a {type(tensor).__name__}")
        procs = _procs(mesh)
        whole = tensor.detach().cpu()
        placed = _placed(procs, placements, tuple(whole.shape))
        holder = _holder(procs, device_type, timeout)
        buffers: dict[Part, RDMABuffer] = {}
        given: list[tuple[RDMABuffer | None, tuple[int, ...]]] = []
        pieces = []
        for part in parts_of(whole.shape, _cuts(placed), procs.extent):
            size = tuple(length for _, length in part)
            if 0 not in size and part not in buffers:
                piece = whole[_slices(part)].contiguous()
                pieces.append(piece)
                buffers[part] = RDMABuffer(piece, writable=False)
            given.append((buffers.get(part), size))
        number = _number()
        dtype = str(whole.dtype).removeprefix("torch.")
        try:
            done = _all(holder.take.call(number, given, tuple(whole.shape), dtype, placed), timeout)
        finally:
            for buffer in buffers.values():
                with contextlib.suppress(
                    SkyMonarchError
                ):  # a reader that hangs: the memory lives on until it ends
                    buffer.drop(timeout=timeout)
        return cls(procs, holder, number, done, device_type, timeout)

    @classmethod
    def from_function(
        cls,
        mesh: Any,
        fn: Callable[[tuple[int, ...], tuple[int, ...]], Any],
        shape: Sequence[int],
        placements: Any,
        *,
        dtype: Any = None,
        device_type: str = "cpu",
        timeout: float = _TIMEOUT_S,
    ) -> ShardedTensor:
        """Let each process make its part.

        Args:
            mesh: Of processes, or of actors.
            fn: Called there with the size of a part and where in the whole it begins; returns a tensor of that size.
            shape: Of the whole.
            placements: As of :meth:`from_full`.
            dtype: By default torch's ``float32``; what ``fn`` returns is converted.
            device_type: Where the parts are to lie.
            timeout: Seconds, for this and for everything that is done to it later.

        Raises:
            ConfigError: The placements do not fit, or ``fn`` has returned something else.
            ActorError: ``fn`` has raised.
            SupervisionError: A process is dead.
        """
        procs = _procs(mesh)
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise ConfigError(f"shape is {sizes}", hint="sizes are 0 or more")
        placed = _placed(procs, placements, sizes)
        name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        holder = _holder(procs, device_type, timeout)
        number = _number()
        done = _all(holder.make.call(number, fn, sizes, name, placed), timeout)
        return cls(procs, holder, number, done, device_type, timeout)

    # --- what it is ----------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """Torch's dtype."""
        import torch

        return getattr(torch, self._dtype)

    @property
    def placements(self) -> tuple[Any, ...]:
        """Torch's placements, one for each dimension of the mesh."""
        return tuple(to_torch(self._placed))

    @property
    def mesh(self) -> ProcMesh:
        """The processes that have its parts."""
        return self._mesh

    def dtensor(self) -> Any:
        """In a process of the mesh: the ``DTensor``, whose ``to_local()`` is the part that is here.

        Raises:
            StaleHandleError: It is not here.
        """
        return held(self._number)

    # --- what is done to it ---------------------------------------------------------------------------

    def reshard(self, placements: Any) -> ShardedTensor:
        """The same values in other parts; the processes send each other what moves.

        Raises:
            ConfigError: The placements do not fit.
            StaleHandleError: A process was replaced since it was made.
            SupervisionError: A process is dead.
        """
        placed = _placed(self._mesh, placements, self._shape)
        number = _number()
        return self._made(number, self._holder.reshard.call(number, self._number, placed))

    def apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ShardedTensor:
        """What ``fn(tensor, *args, **kwargs)`` returns, computed by all processes with their parts.

        Args:
            fn: Gets ``DTensor`` objects and returns one: ``weights.apply(torch.matmul, inputs)``.
            args: Handles of tensors of the same processes, or anything else.
            kwargs: The same.

        Raises:
            ConfigError: A handle is of other processes, or ``fn`` has returned something else.
            ActorError: ``fn`` has raised; also where torch cannot compute that with these placements.
            StaleHandleError: A process was replaced since one of them was made.
            SupervisionError: A process is dead.
        """
        given = tuple(self._given(one) for one in (self, *args))
        named = {name: self._given(value) for name, value in kwargs.items()}
        number = _number()
        return self._made(number, self._holder.apply.call(number, fn, given, named))

    def reduce(self, op: str = "sum", dim: int | None = None, *, keepdim: bool = False) -> Any:
        """Reduce it, and bring the result here.

        Args:
            op: ``sum``, ``mean``, ``prod``, ``max`` or ``min``.
            dim: Of the tensor; None for all of it, to one number.
            keepdim: Whether that dimension stays, with size 1.

        Returns:
            A tensor of torch.

        Raises:
            ConfigError: There is no such reduction or dimension.
            StaleHandleError: A process was replaced since it was made.
            SupervisionError: A process is dead.
        """
        if op not in _REDUCTIONS:
            raise ConfigError(f"{op!r} is no reduction", hint=f"one of {', '.join(_REDUCTIONS)}")
        if dim is not None and not -len(self._shape) <= dim < len(self._shape):
            raise ConfigError(f"dim is {dim}, but the tensor has {len(self._shape)} dimensions")
        import torch

        dtype, shape, data = _get(
            self._holder.reduce.call(self._number, _REDUCTIONS[op], dim, keepdim), self._timeout
        ).get(0)
        if not data:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)

    def shard(self, rank: int | None = None, /, **point: int) -> Any:
        """Bring one part here: ``t.shard(3)``, or by place, ``t.shard(dp=0, tp=1)``.

        Returns:
            A tensor of torch, a copy.

        Raises:
            ConfigError: Neither or both are given.
            IndexError: There is no such rank, or index along a dimension.
            KeyError: There is no such dimension, or one is missing.
            StaleHandleError: The process was replaced since the tensor was made.
            SupervisionError: It is dead.
        """
        if (rank is None) == (not point):
            raise ConfigError("shard takes a rank or a place", hint="t.shard(3), or t.shard(dp=0, tp=1)")
        extent = self._mesh.extent
        at = extent.point(rank).rank if rank is not None else extent.rank_of(point)
        # What is only a part of a sum has to be added up first, by all.
        lenders = self._holder if self._is_partial() else self._holder._one(at)
        lent = _get(lenders.lend.call(self._number), self._timeout).get(at if self._is_partial() else 0)
        try:
            return self._read(*lent)
        finally:
            _get(lenders.give_back.call(self._number), self._timeout)

    def full(self) -> Any:
        """Bring all of it here, each part once, straight into its place where that is contiguous.

        Returns:
            A tensor of torch.

        Raises:
            StaleHandleError: A process was replaced since it was made.
            SupervisionError: A process is dead.
        """
        import torch

        whole = torch.empty(self._shape, dtype=self.dtype)
        parts = parts_of(self._shape, _cuts(self._placed), self._mesh.extent)
        lent = _get(self._holder.lend.call(self._number), self._timeout)
        try:
            for part, (buffer, size) in dict(zip(parts, lent.values(), strict=True)).items():
                if tuple(length for _, length in part) != size:
                    raise ConfigError(
                        f"a process has {size} where {part} was expected: torch has cut it otherwise"
                    )
                place = whole[_slices(part)]
                if buffer is None:
                    continue
                if place.is_contiguous():
                    buffer.read_into(place, timeout=self._timeout)
                else:
                    place.copy_(self._read(buffer, size))
        finally:
            _get(self._holder.give_back.call(self._number), self._timeout)
        return whole

    def drop(self) -> None:
        """Let its parts go. May be said twice."""
        if self._finalizer is not None:
            self._finalizer()

    # ---------------------------------------------------------------------------------------------------

    def _is_partial(self) -> bool:
        return any(kind == "partial" for kind, *_ in self._placed)

    def _read(self, buffer: RDMABuffer | None, size: tuple[int, ...]) -> Any:
        import torch

        found = torch.empty(size, dtype=self.dtype)
        if buffer is not None:
            buffer.read_into(found, timeout=self._timeout)
        return found

    def _given(self, value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        if value._holder is not self._holder and value._holder._actor_id != self._holder._actor_id:
            raise ConfigError(
                "tensors of other processes, or of the same in another shape, cannot be computed with",
                hint="make both on the same mesh",
            )
        return (GIVEN, value._number)

    def _made(self, number: int, call: Future[Any]) -> ShardedTensor:
        done = _all(call, self._timeout)
        return ShardedTensor(self._mesh, self._holder, number, done, self._device_type, self._timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        summary = (self._shape, self._dtype, self._placed)
        return _sent, (self._mesh, self._holder, self._number, summary, self._device_type, self._timeout)

    def __repr__(self) -> str:
        where = ", ".join(f"{one}" for one in self.placements)
        return f"<ShardedTensor {self._shape} {self._dtype} [{where}] on {self._mesh!r}>"


def _sent(*args: Any) -> ShardedTensor:
    return ShardedTensor(*args, owned=False)


def _procs(mesh: Any) -> ProcMesh:
    from sky_monarch.actors.actor_mesh import ActorMesh

    found: ProcMesh = mesh._procs() if isinstance(mesh, ActorMesh) else mesh
    return found


def _holder(procs: ProcMesh, device_type: str, timeout: float) -> Any:
    """The actors that hold the parts. The processes are set up together first, where they are not."""
    from sky_monarch.actors import spmd

    if device_type not in ("cpu", "cuda"):
        raise ConfigError(f"device_type is {device_type!r}", hint="cpu or cuda")
    if not spmd.is_formed(procs, timeout):
        spmd.form(procs, master=(None, 0), env={}, timeout=timeout)
    addresses = tuple(procs._addresses_of())
    key = (addresses, procs.extent, device_type)
    with _lock:
        if key not in _holders:
            if len(_holders) >= _MOST_HOLDERS:
                del _holders[next(iter(_holders))]
            _holders[key] = procs.spawn(f"{procs.name}.tensors", Holder, addresses, procs.extent, device_type)
        return _holders[key]


def _placed(procs: ProcMesh, placements: Any, shape: tuple[int, ...]) -> Placed:
    """The placements that a user gave, checked."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import Placement

    labels = procs.extent.labels or ["rank"]
    if isinstance(placements, Mapping):
        unknown = [name for name in placements if name not in labels]
        if unknown:
            raise ConfigError(f"the mesh has no dimension {unknown[0]!r}", hint=f"it has {', '.join(labels)}")
        placements = [placements.get(name, Replicate()) for name in labels]
    elif isinstance(placements, Placement):
        placements = [placements]
    placements = list(placements)
    if len(placements) != len(labels):
        raise ConfigError(
            f"{len(placements)} placements for a mesh of {len(labels)} dimensions",
            hint="one for each, or a mapping of names to placements",
        )
    placed = []
    for kind, *rest in of_torch(placements):
        if kind == "partial":
            raise ConfigError(
                "Partial is what computing leaves, and cannot be asked for", hint="Shard(dim) or Replicate()"
            )
        if kind == "shard":
            dim = rest[0] + len(shape) if rest[0] < 0 else rest[0]
            if not 0 <= dim < len(shape):
                raise ConfigError(f"Shard({rest[0]}) of a tensor of {len(shape)} dimensions")
            rest = [dim]
        placed.append((kind, *rest))
    return tuple(placed)


def _cuts(placed: Placed) -> list[int | None]:
    return [rest[0] if kind == "shard" else None for kind, *rest in placed]


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in part)


def _number() -> int:
    return int.from_bytes(os.urandom(7), "big") + 1


def _get(call: Future[Any], timeout: float) -> Any:
    """The answer; what concerns the handle as it was raised there."""
    try:
        return call.get(timeout)
    except ActorError as error:
        if isinstance(error.__cause__, ConfigError | StaleHandleError):
            raise type(error.__cause__)(str(error.__cause__), hint=error.__cause__.hint) from error
        raise


def _all(call: Future[Any], timeout: float) -> Summary:
    """What all ranks say of a tensor, which is the same."""
    said = list(_get(call, timeout).values())
    for other in said[1:]:
        if other != said[0]:
            raise SupervisionError(f"the processes have different tensors: {said[0]} and {other}")
    found: Summary = said[0]
    return found


def _drop(holder: Any, number: int) -> None:
    with contextlib.suppress(Exception):  # the mesh may be gone by now, and its tensors with it
        holder.drop.broadcast(number)
