"""The ranks' side of tensors that a program holds handles of: what each rank has, and what is done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sky_monarch.actors.actor import Actor, endpoint
from sky_monarch.actors.context import current_rank
from sky_monarch.actors.elastic import member
from sky_monarch.actors.process_group import mesh_of
from sky_monarch.actors.rdma import RDMABuffer
from sky_monarch.errors import ConfigError, StaleHandleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch.actors.extent import Extent

__all__ = ["GIVEN", "Flat", "Given", "Holder", "Placed", "Summary", "held", "of_torch", "to_torch"]

#: DTensors of this process and the set-up they belong to, by the number of their handle.
_held: dict[int, tuple[str, Any]] = {}
#: First of what stands for a handle among arguments.
GIVEN = "sky-monarch tensor"

#: Of a handle, as it travels in place of its tensor.
Given = tuple[str, int]
#: Of each dimension of a mesh, what torch has there: ``("shard", dim)``, ``("replicate",)`` or ``("partial", op)``.
Placed = tuple[tuple[Any, ...], ...]
#: Name of the dtype, shape, and bytes.
Flat = tuple[str, tuple[int, ...], bytes]
#: Shape, name of the dtype, placements.
Summary = tuple[tuple[int, ...], str, Placed]


def held(number: int) -> Any:
    """The DTensor of a handle.

    Raises:
        StaleHandleError: This process does not have it.
    """
    key, found = _held.get(number, ("", None))
    if found is None:
        raise StaleHandleError(
            "a process does not have that tensor: it was dropped, or the process replaced since"
        )
    if key != member().membership.key:
        raise StaleHandleError(
            "the processes were set up anew since that tensor was made, and its parts are lost"
        )
    return found


def to_torch(placed: Placed) -> list[Any]:
    """As torch has them."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    made = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    return [made[kind](*rest) for kind, *rest in placed]


def of_torch(placements: Any) -> Placed:
    """Those of torch, as they travel.

    Raises:
        ConfigError: One is of a kind that is not known here.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[tuple[Any, ...]] = []
    for one in placements:
        if type(one) is Shard:
            found.append(("shard", one.dim))
        elif isinstance(one, Replicate):
            found.append(("replicate",))
        elif isinstance(one, Partial):
            found.append(("partial", one.reduce_op))
        else:
            raise ConfigError(
                f"{one} is no placement that a sharded tensor can have", hint="Shard(dim) or Replicate()"
            )
    return tuple(found)


def _keep(number: int, tensor: Any) -> Summary:
    _held[number] = (member().membership.key, tensor)
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), of_torch(tensor.placements)


def _given(value: Any) -> Any:
    """A tensor for each handle among the arguments."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == GIVEN:
        return held(value[1])
    return value


class Holder(Actor):
    """Holds one rank's parts of the tensors of a mesh.

    Args:
        addresses: Of the processes of the mesh, by rank.
        extent: Its dimensions.
        device_type: Where the parts are, ``cpu`` or ``cuda``.
    """

    def __init__(self, addresses: tuple[str, ...], extent: Extent, device_type: str) -> None:
        self._addresses = addresses
        self._extent = extent
        self._device_type = device_type
        self._lent: dict[int, tuple[Any, RDMABuffer]] = {}

    def _mesh(self) -> Any:
        return mesh_of(self._extent, self._addresses, self._device_type)

    @endpoint
    def make(
        self, number: int, fn: Callable[..., Any], shape: tuple[int, ...], dtype: str, placed: Placed
    ) -> Summary:
        """A tensor each part of which this rank computes itself."""
        import torch
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = self._mesh(), to_torch(placed)
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        local = fn(tuple(size), tuple(offset))
        if not isinstance(local, torch.Tensor) or tuple(local.shape) != tuple(size):
            found = tuple(local.shape) if isinstance(local, torch.Tensor) else type(local).__name__
            raise ConfigError(
                f"the function returned {found} for a part of shape {tuple(size)} at {tuple(offset)}"
            )
        local = local.to(dtype=getattr(torch, dtype), device=self._device_type)
        return _keep(number, _whole_of(local, mesh, placements, shape))

    @endpoint
    def take(
        self,
        number: int,
        parts: list[tuple[RDMABuffer | None, tuple[int, ...]]],
        shape: tuple[int, ...],
        dtype: str,
        placed: Placed,
    ) -> Summary:
        """A tensor each part of which is read from the program's memory."""
        import torch

        mesh = self._mesh()
        buffer, size = parts[current_rank().rank]
        local = torch.empty(size, dtype=getattr(torch, dtype))
        if buffer is not None:
            buffer.read_into(local)
        return _keep(number, _whole_of(local.to(self._device_type), mesh, to_torch(placed), shape))

    @endpoint
    def reshard(self, number: int, source: int, placed: Placed) -> Summary:
        """The same tensor in other parts."""
        return _keep(number, held(source).redistribute(placements=to_torch(placed)))

    @endpoint
    def apply(
        self, number: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Summary:
        """What a function of tensors returns."""
        from torch.distributed.tensor import DTensor

        made = fn(*(_given(one) for one in args), **{name: _given(value) for name, value in kwargs.items()})
        if not isinstance(made, DTensor):
            raise ConfigError(
                f"the function returned a {type(made).__name__}, not a DTensor",
                hint="compute with its arguments",
            )
        return _keep(number, made)

    @endpoint
    def reduce(self, source: int, op: str, dim: int | None, keepdim: bool) -> Flat | None:
        """A reduction over all parts; from rank 0 alone, as dtype, shape and bytes."""
        import torch

        tensor, function = held(source), getattr(torch, op)
        found = function(tensor) if dim is None else function(tensor, dim, keepdim)
        whole = found.full_tensor().detach().cpu().contiguous()
        if current_rank().rank != 0:
            return None
        return str(whole.dtype).removeprefix("torch."), tuple(whole.shape), as_bytes(whole)

    @endpoint
    def lend(self, source: int) -> tuple[RDMABuffer | None, tuple[int, ...]]:
        """This rank's part, for the program to read; kept as it is until :meth:`give_back`."""
        from torch.distributed.tensor import Partial, Replicate

        tensor = held(source)
        if any(isinstance(one, Partial) for one in tensor.placements):
            whole = [Replicate() if isinstance(one, Partial) else one for one in tensor.placements]
            tensor = tensor.redistribute(placements=whole)
        local = tensor.to_local().detach().cpu().contiguous()
        if local.numel() == 0:
            return None, tuple(local.shape)
        self.give_back_one(source)
        buffer = RDMABuffer(local, writable=False)
        self._lent[source] = (local, buffer)
        return buffer, tuple(local.shape)

    @endpoint
    def give_back(self, source: int) -> None:
        """The program has read it."""
        self.give_back_one(source)

    def give_back_one(self, source: int) -> None:
        """The same, where it may not have been lent."""
        lent = self._lent.pop(source, None)
        if lent is not None:
            lent[1].drop()

    @endpoint
    def drop(self, number: int) -> None:
        """Nobody has a handle of it any more."""
        self.give_back_one(number)
        _held.pop(number, None)


def _whole_of(local: Any, mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> Any:
    """The DTensor of which ``local`` is this rank's part."""
    import torch
    from torch.distributed.tensor import DTensor

    whole = {"shape": torch.Size(shape), "stride": _rows(shape)}
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose last dimension varies fastest."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def as_bytes(tensor: Any) -> bytes:
    """The bytes of a contiguous CPU tensor, of any dtype."""
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
