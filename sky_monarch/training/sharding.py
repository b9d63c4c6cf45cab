"""A model that ``fully_shard`` (FSDP2) has dealt out over the ranks of its replica group.

Its parameters, gradients and optimizer states are DTensors, of which each rank holds a shard. FSDP averages
gradients inside the group; the session averages the shards over the groups, rank ``i`` with the ranks ``i``
of the others, and hands them to a rank ``i`` that heals.

FSDP keeps some parameters whole during a step. Whoever asked for ``state_dict()`` from another thread
meanwhile would take them from under the forward pass (torchtitan #4754), so donors get what was noted before
the step: tensors that share the memory of the shards, which only the optimizer writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from sky_monarch.errors import ConfigError

__all__ = ["MODEL", "Piece", "Sharding", "like", "local_of", "reshard"]

MODEL = "model"
"""Key of the model among the parts of the state."""

_HINT = "fully_shard(model, mesh=inner_mesh()): FSDP over the ranks of the group, the session over the groups"


class Piece(NamedTuple):
    """A DTensor on its way between two processes: its mesh is known where it arrives.

    Attributes:
        local: This rank's shard.
        shape: Of the whole.
        stride: Of the whole.
        dims: Which dimension is dealt out along each dimension of the mesh; None for none.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, value: DTensor) -> Piece:
        """Take it from ``value``, whose memory it shares.

        Raises:
            ConfigError: Each rank holds a summand: that is no state.
        """
        if any(placement.is_partial() for placement in value.placements):
            raise ConfigError(f"a tensor of the state is {value.placements}: a sum that is not summed up yet")
        dims = tuple(it.dim if isinstance(it, Shard) else None for it in value.placements)
        return cls(value.detach().to_local(), tuple(value.shape), tuple(value.stride()), dims)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def on(self, mesh: DeviceMesh) -> DTensor:
        """The DTensor, on ``mesh``."""
        placements = [Replicate() if dim is None else Shard(dim) for dim in self.dims]
        return DTensor.from_local(
            self.local, mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as a tensor that is dealt out as ``param`` is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def reshard(model: torch.nn.Module) -> None:
    """Let parameters be shards again that FSDP left whole, as it does after an evaluation."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has sharded nothing
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            module.reshard()


class Sharding:
    """How the model of this process is sharded, if it is.

    Args:
        model: As the recipe has wrapped it.
        world_size: Ranks of this replica group.

    Raises:
        ConfigError: It is sharded otherwise than over all ranks of the group.

    Attributes:
        mesh: The ranks of the group; None for a model that every rank has whole.
    """

    def __init__(self, model: torch.nn.Module, *, world_size: int) -> None:
        reshard(model)
        self._model = model
        self._noted: Any = None
        self.mesh: DeviceMesh | None = None
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(
            isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
        ):
            raise ConfigError("the model is wrapped in FullyShardedDataParallel (FSDP1)", hint=_HINT)
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                _require_group(name, param, world_size)
                if self.mesh is not None and self.mesh != param.device_mesh:
                    raise ConfigError(
                        f"{name} lies on another mesh than the parameters before it",
                        hint="mesh = inner_mesh() once, and fully_shard(..., mesh=mesh) for all of them",
                    )
                self.mesh = param.device_mesh

    def note(self) -> None:
        """Before each step, in its thread: note what donors hand out while it computes."""
        if self.mesh is not None:
            self._noted = self._model.state_dict()

    def carried(
        self, key: str, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> tuple[Callable[[Any], None], Callable[[], Any]]:
        """The functions of a part of the state, for the way to a rank that heals.

        Args:
            key: Of the part.
            load: Applies it; called between two steps.
            save: Returns it; called in another thread while a step computes.
        """
        mesh = self.mesh
        if mesh is None:
            return load, save

        def load_pieces(state: Any) -> None:
            whole = lambda it: it.on(mesh) if isinstance(it, Piece) else it  # noqa: E731
            load(tree_map(whole, state, is_leaf=lambda it: isinstance(it, Piece)))

        def save_pieces() -> Any:
            state = self._noted if key == MODEL else save()
            return tree_map(lambda it: Piece.of(it) if isinstance(it, DTensor) else it, state)

        return load_pieces, save_pieces


def _require_group(name: str, param: DTensor, world_size: int) -> None:
    mesh = param.device_mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"{name} lies on a mesh of {mesh.ndim} dimensions (HSDP?); a session knows one, the ranks of its "
            "replica group",
            hint=_HINT,
        )
    ranks = mesh.mesh.tolist()
    if ranks != list(range(world_size)):
        raise ConfigError(
            f"{name} is dealt out over the ranks {ranks}, but this replica group has {world_size}: "
            "0 to its last",
            hint=_HINT,
        )
    if not isinstance(param.placements[0], Shard):
        raise ConfigError(
            f"{name} is {param.placements[0]} on its mesh; only shards are averaged", hint=_HINT
        )
