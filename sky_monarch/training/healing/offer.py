"""What a donor offers: registered tensors, and the words by which joiners find them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sky_monarch.actors.device_memory import Fence
from sky_monarch.actors.rdma import Memory, memory_of_tensors
from sky_monarch.errors import CheckpointError
from sky_monarch.training.healing.encoding import Leaf, Shape

__all__ = ["Donor", "Manifest", "layout_of", "memory_of_leaves"]

_MOST_TENSORS = 4_000_000


def memory_of_leaves(tensors: Iterable[torch.Tensor], fence: Fence | None = None) -> Memory:
    """Their memory, one after the other; they have no gaps, and hold what they are to after ``fence``: None for now."""
    return memory_of_tensors(list(tensors), fence)


def layout_of(leaves: Iterable[Leaf]) -> str:
    """Equal for equal paths and shapes, in order: then any byte lies at the same place."""
    digest = hashlib.sha256()
    for leaf in leaves:
        shape = Shape.of(leaf.tensor)
        digest.update(json.dumps([leaf.path, shape.dtype, shape.size, shape.stride]).encode())
    return digest.hexdigest()


def _whole(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise CheckpointError(f"a donor's word is malformed: {str(value)[:40]!r} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"a donor's word is malformed: {str(value)[:40]!r} is no text")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"a donor's word is malformed: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError("a donor's word is malformed: it is no object")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """One member's word, under the quorum's own prefix of the rendezvous store: what all have alike.

    Attributes:
        replica: Replica group.
        step: Steps committed.
        layout: Of the tensors.
        handle: Of their memory.
    """

    replica: int
    step: int
    layout: str
    handle: str

    def to_text(self) -> str:
        """For the store."""
        return json.dumps([self.replica, self.step, self.layout, self.handle])

    @classmethod
    def of_text(cls, text: str) -> Donor:
        """What :meth:`to_text` made.

        Raises:
            CheckpointError: It did not.
        """
        value = _object(f'{{"of": {text}}}')["of"]
        if not isinstance(value, list) or len(value) != 4:
            raise CheckpointError("a donor's word is malformed")
        replica, step, layout, handle = value
        return cls(replica=_whole(replica), step=_whole(step), layout=_text(layout), handle=_text(handle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the assigned donor says of its state.

    Attributes:
        step: Steps committed.
        replica: Its replica group.
        layout: Of the tensors that all have alike.
        tree: The state, as JSON values.
        shapes: Of all tensors, in the order of the tree.
        paths: Of those that all have alike; None for one that only this donor has.
        common: Handle of those that all have alike; None for none.
        own: Handle of the others; None for none.
    """

    step: int
    replica: int
    layout: str
    tree: Any
    shapes: Sequence[Shape]
    paths: Sequence[tuple[str, ...] | None]
    common: str | None
    own: str | None

    def to_bytes(self) -> bytes:
        """UTF-8 JSON."""
        tensors = [
            [shape.to_json(), None if path is None else list(path)]
            for shape, path in zip(self.shapes, self.paths, strict=True)
        ]
        value = {
            "step": self.step,
            "replica": self.replica,
            "layout": self.layout,
            "tree": self.tree,
            "tensors": tensors,
            "common": self.common,
            "own": self.own,
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Manifest:
        """What :meth:`to_bytes` made.

        Raises:
            CheckpointError: It did not.
        """
        value = _object(data.decode(errors="replace"))
        tensors = value.get("tensors")
        if not isinstance(tensors, list) or len(tensors) > _MOST_TENSORS:
            raise CheckpointError("a donor's word is malformed: it lists no tensors")
        shapes: list[Shape] = []
        paths: list[tuple[str, ...] | None] = []
        for entry in tensors:
            if not isinstance(entry, list) or len(entry) != 2:
                raise CheckpointError("a donor's word is malformed: an entry is no tensor")
            shapes.append(Shape.of_json(entry[0]))
            paths.append(None if entry[1] is None else tuple(_text(word) for word in entry[1]))
        common, own = value.get("common"), value.get("own")
        return cls(
            step=_whole(value.get("step")),
            replica=_whole(value.get("replica")),
            layout=_text(value.get("layout")),
            tree=value.get("tree"),
            shapes=shapes,
            paths=paths,
            common=None if common is None else _text(common),
            own=None if own is None else _text(own),
        )
