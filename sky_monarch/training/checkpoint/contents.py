"""The state of a replica group as files of torch.distributed.checkpoint, and back.

What a rank saves is a flat dict: each tensor under a readable key (``model.net.0.weight``), and under
``rank<n>.skeleton`` everything else, with the tensors' keys in their places. Model and optimizer are the
group's: a DTensor is saved by each rank that holds a shard of it, a plain tensor by one rank for all. What
else was registered is the rank's own (a data loader's position, a generator's state).
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_with_path

from sky_monarch.training.checkpoint.layout import OLD_STATE
from sky_monarch.training.checkpoint.meeting import Meeting

__all__ = ["MANAGER", "Snapshots", "bytes_of", "estimate", "read", "read_old", "write"]

MANAGER = "torchft.manager"
"""Key of the part that is TorchFT's own."""

logger = logging.getLogger(__name__)

_SHARED = ("model", "optimizer")
_OPTIMIZER_STATE = re.compile(r"optimizer\.state\.(\d+)\.[^.]+")
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands in the skeleton where a tensor was."""

    key: str


class Snapshots:
    """Copies of the state on the CPU that training does not change: all that a save costs the training thread.

    The buffers of the last one are used again, for fresh memory costs more than the copy itself. One
    snapshot may be in use at a time.

    Args:
        rank: This rank of its group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Copy.

        Args:
            parts: What the registered functions returned, by key.
        """
        flat: dict[str, Any] = {}

        def leaf(path: Sequence[Any], value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            key = _key(self._rank, path)
            while key in flat:  # {"a.b": …} and {"a": {"b": …}}
                key += "'"
            flat[key] = self._copy(key, value)
            return _Slot(key)

        with torch.no_grad():
            skeleton = tree_map_with_path(leaf, dict(parts))
        for unused in self._buffers.keys() - flat.keys():
            del self._buffers[unused]
        flat[_skeleton_key(self._rank)] = skeleton
        return flat

    def _copy(self, key: str, value: torch.Tensor) -> torch.Tensor:
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            self._buffers[key] = buffer
        _copy(buffer, local)
        if not isinstance(value, DTensor):
            return buffer
        shape, stride = value.shape, value.stride()
        return DTensor.from_local(
            buffer, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
        )


def _copy(buffer: torch.Tensor, local: torch.Tensor) -> None:
    if local.device.type == "cpu" and local.layout == torch.strided and local.is_contiguous():
        # One memcpy. torch deals it out to its threads, whose waits for each other cost many times the copy
        # where the cores are busy (measured: 0.3 s of CPU against 0.04 for 256 MiB).
        target, source = buffer.reshape(-1).view(torch.uint8), local.reshape(-1).view(torch.uint8)
        np.copyto(target.numpy(), source.numpy())
    else:
        buffer.copy_(local)


def bytes_of(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors that this rank may have to write."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    return sum(local.numel() * local.element_size() for local in locals_)


def estimate(parts: Mapping[str, Any]) -> int:
    """Bytes of the tensors in a whole checkpoint of ``parts``, those of the other ranks of a group included."""
    tensors = (leaf for leaf in tree_leaves(dict(parts)) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write(tmp: Path, state: Mapping[str, Any], meeting: Meeting) -> list[str]:
    """Write this rank's share of ``state`` into ``tmp``, together with the others of its group.

    The steps are those of ``torch.distributed.checkpoint.save``, without its collectives.

    Returns:
        Names of the files that this rank wrote.
    """
    coordinator = meeting.rank == 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(tmp, sync_files=False)
    planner.set_up_planner(dict(state), writer.storage_meta(), coordinator)
    writer.set_up_storage_writer(coordinator)
    meeting.tell("plan", writer.prepare_local_plan(planner.create_local_plan()))
    metadata = None
    if coordinator:
        plans, metadata = planner.create_global_plan(meeting.hear_all("plan"))
        meeting.tell("shares", writer.prepare_global_plan(plans))
    share = meeting.hear("shares", 0)[meeting.rank]
    writing = writer.write_data(planner.finish_plan(share), planner)
    writing.wait()
    meeting.tell("written", writing.value())
    names = sorted(path.name for path in tmp.glob(f"__{meeting.rank}_*"))
    if metadata is not None:
        writer.finish(metadata, meeting.hear_all("written"))
        names.append(_METADATA)
    return names


def read(
    home: Path,
    live: Mapping[str, Any],
    parameters: Sequence[torch.Tensor],
    *,
    rank: int,
    world_size: int,
    saved_by: int,
) -> dict[str, Any]:
    """Read the parts of this rank; nothing of ``live`` is changed.

    Args:
        home: A verified checkpoint.
        live: The parts as they are now: tells how tensors are sharded here.
        parameters: Of the optimizer, in its order: its state is sharded as they are.
        rank: This rank.
        world_size: Ranks of this group.
        saved_by: Ranks of the group that saved it.
    """
    if saved_by != world_size:
        logger.warning(
            "%s was saved by a group of %d ranks, this one has %d: model and optimizer are dealt out anew, "
            "what else was registered is that of rank %d",
            home.name, saved_by, world_size, rank % saved_by,
        )  # fmt: skip
    whose = rank % saved_by
    reader = FileSystemReader(home)
    metadata = reader.read_metadata()
    sharded: dict[str, DTensor] = {}

    def note(path: Sequence[Any], value: Any) -> None:
        if isinstance(value, DTensor):
            sharded[_key(rank, path)] = value

    tree_map_with_path(note, {key: live[key] for key in _SHARED if key in live})
    state: dict[str, Any] = {}
    for key, facts in metadata.state_dict_metadata.items():
        if key.startswith("rank") and not key.startswith(f"rank{whose}."):
            continue
        if not isinstance(facts, TensorStorageMetadata):
            state[key] = None  # replaced by what is read
            continue
        like = sharded.get(key)
        if like is None and (match := _OPTIMIZER_STATE.fullmatch(key)):
            number = int(match[1])
            param = parameters[number] if number < len(parameters) else None
            like = param if isinstance(param, DTensor) and param.shape == facts.size else None
        dtype = facts.properties.dtype
        if like is not None:
            state[key] = torch.empty_like(like.detach(), dtype=dtype)
        else:
            state[key] = torch.empty(facts.size, dtype=dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    skeleton: dict[str, Any] = state[_skeleton_key(whose)]
    parts: dict[str, Any] = tree_map(
        lambda leaf: state[leaf.key] if isinstance(leaf, _Slot) else leaf, skeleton
    )
    return parts


def read_old(home: Path) -> dict[str, Any]:
    """Read a checkpoint of the first format, a single file."""
    # The user's own folder; the states of schedulers and data loaders are more than tensors.
    state = torch.load(home / OLD_STATE, map_location="cpu", weights_only=False)
    return {**state["states"], MANAGER: state["manager"]}


def _skeleton_key(rank: int) -> str:
    return f"rank{rank}.skeleton"


def _key(rank: int, path: Sequence[Any]) -> str:
    words = [
        str(next(getattr(step, name) for name in ("key", "idx", "name") if hasattr(step, name)))
        for step in path
    ]
    prefix = [] if words[0] in _SHARED else [f"rank{rank}", "part"]
    return ".".join([*prefix, *words])
