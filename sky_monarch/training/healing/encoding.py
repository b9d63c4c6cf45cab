"""A state as JSON and tensors, in place of pickle: what a peer sends can be wrong, but it runs nothing.

What is known: None, bools, numbers, texts, bytes, lists, tuples, dicts, sets, counters, torch's sizes, dtypes and
tensors, numpy's arrays and numbers, and shards. Anything else is refused where it is sent.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sky_monarch.errors import CheckpointError
from sky_monarch.training.sharding import MODEL, Piece

__all__ = ["Leaf", "Replicated", "Shape", "decode", "encode"]

Path = tuple[str, ...]

_KIND, _OF = "!", "of"
# A state is a few dicts deep. JSON's own reader stops deeper ones, too.
_MOST_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be known of a tensor before its bytes can lie anywhere.

    Attributes:
        dtype: Name, such as ``float32``.
        size: Of each dimension.
        stride: Of each dimension; the tensor has no gaps.
        on_device: Whether it lies on an accelerator. Shapes are equal all the same: bytes are bytes.
    """

    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    on_device: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """That of ``tensor``."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type != "cpu")

    @classmethod
    def of_json(cls, value: Any) -> Shape:
        """What :meth:`to_json` made.

        Raises:
            CheckpointError: It did not.
        """
        malformed = CheckpointError(f"this is no shape of a tensor: {str(value)[:80]}")
        if not isinstance(value, list) or len(value) != 4 or type(value[3]) is not bool:
            raise malformed
        dtype, size, stride, on_device = value
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise malformed
        if not isinstance(size, list) or not isinstance(stride, list) or len(size) != len(stride):
            raise malformed
        if not all(type(number) is int and number >= 0 for number in [*size, *stride]):
            raise malformed
        shape = cls(dtype, tuple(size), tuple(stride), on_device)
        if not shape.is_dense:
            raise CheckpointError(f"a tensor has gaps: {shape}")
        return shape

    def to_json(self) -> list[Any]:
        """As JSON values."""
        return [self.dtype, list(self.size), list(self.stride), self.on_device]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.size) * int(dtype.itemsize)

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie in one piece, each once, in whatever order."""
        if 0 in self.size:
            return True
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    def empty(self, accelerator: torch.device) -> torch.Tensor:
        """A tensor of this shape, with whatever was in its memory.

        Args:
            accelerator: This process's, for what lies on one at the donor; the host's memory where it has none.
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        device = accelerator if self.on_device else torch.device("cpu")
        return torch.empty_strided(self.size, self.stride, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a state, and where in it."""

    path: Path
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Which tensors have the same bits on all groups after each commit, so that any of them can give them.

    What changes in a forward pass (running means, random numbers, positions in the data) is not among them: it comes
    from the one group that TorchFT assigned.

    Attributes:
        parameters: Names in the model's state.
        parts: Other parts of the state of which it holds for every tensor.
    """

    parameters: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()

    @property
    def keys(self) -> frozenset[str]:
        """Parts of the state that hold any."""
        return self.parts | ({MODEL} if self.parameters else frozenset())

    def covers(self, path: Path) -> bool:
        """Whether it holds for the tensor at ``path``, which begins with the key of a part."""
        if path[0] in self.parts:
            return True
        return path[0] == MODEL and len(path) > 1 and path[1] in self.parameters


@dataclass(slots=True)
class _Encoder:
    leaves: list[Leaf] = field(default_factory=list)

    def node(self, value: Any, path: Path) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if len(path) > _MOST_DEPTH:
            raise CheckpointError(f"the state is more than {_MOST_DEPTH} deep at {_shown(path)}")
        if type(value) is list:
            return self._items(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Piece):
            local = self.node(value.local, (*path, "local"))
            return _tag("piece", [local, list(value.shape), list(value.stride), list(value.dims)])
        return self._other(value, path)

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self.node(item, (*path, str(index))) for index, item in enumerate(values)]

    def _other(self, value: Any, path: Path) -> Any:
        if type(value) is torch.Size:
            return _tag("size", list(value))
        if type(value) is tuple:
            return _tag("tuple", self._items(value, path))
        if type(value) in _MAPPINGS:
            pairs = [
                [self.node(key, path), self.node(item, (*path, str(key)))] for key, item in value.items()
            ]
            return _tag(_MAPPINGS[type(value)], pairs)
        if type(value) in (set, frozenset):
            return _tag(type(value).__name__, self._items(value, path))
        if type(value) in (bytes, bytearray):
            return _tag(type(value).__name__, base64.b64encode(value).decode())
        if type(value) is torch.dtype:
            return _tag("dtype", str(value).removeprefix("torch."))
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return _tag("ndarray", self._tensor(torch.from_numpy(value), path))
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return _tag("number", self._tensor(torch.from_numpy(np.atleast_1d(value).copy()), path))
        raise CheckpointError(
            f"the state holds a {type(value).__module__}.{type(value).__qualname__} at {_shown(path)}, which cannot "
            "be handed to a group that heals",
            hint="let save() return numbers, texts, tensors, lists and dicts, or set recovery.healing: http",
        )

    def _tensor(self, value: torch.Tensor, path: Path) -> Any:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, torch.nn.Buffer)
        if not plain or value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise CheckpointError(
                f"the tensor at {_shown(path)} is a {type(value).__name__} on {value.device}, {value.layout}: only "
                "plain ones that have memory are handed over",
                hint="set recovery.healing: http",
            )
        self.leaves.append(Leaf(path, value.detach()))
        return _tag("tensor", len(self.leaves) - 1)


_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
}


def _tag(kind: str, of: Any) -> dict[str, Any]:
    return {_KIND: kind, _OF: of}


def _shown(path: Path) -> str:
    return ".".join(path) or "its root"


def encode(state: Any, root: Path = ()) -> tuple[Any, list[Leaf]]:
    """JSON values for ``state``, and its tensors, whose memory they are.

    Args:
        state: Whatever the parts of a state return.
        root: Where in a larger state it is.

    Raises:
        CheckpointError: It holds something that is not known here; the message says where.
    """
    encoder = _Encoder()
    return encoder.node(state, root), encoder.leaves


def decode(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state of :func:`encode`.

    Args:
        node: JSON values.
        tensors: In the order of the leaves.

    Raises:
        CheckpointError: ``node`` is nothing that :func:`encode` makes.
    """
    try:
        return _decode(node, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"a donor sent a state that is none: {type(error).__name__}: {error}"
        ) from error


def _decode(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, Mapping):
        return node
    return _DECODERS[node[_KIND]](node[_OF], lambda it: _decode(it, tensors), tensors)


def _whole(index: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if type(index) is not int or index < 0:
        raise ValueError(f"{index!r} is no tensor")
    return tensors[index]


def _piece(of: Any, inner: Callable[[Any], Any]) -> Piece:
    local, shape, stride, dims = of
    return Piece(inner(local), tuple(shape), tuple(stride), tuple(dims))


def _dtype(of: Any) -> torch.dtype:
    found = getattr(torch, of)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{of!r} is no dtype")  # it is a peer's word, not our caller's
    return found


def _pairs(of: Any, inner: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    return [(inner(key), inner(item)) for key, item in of]


_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any], Sequence[torch.Tensor]], Any]] = {
    "tensor": lambda of, _, tensors: _whole(of, tensors),
    "piece": lambda of, inner, _: _piece(of, inner),
    "tuple": lambda of, inner, _: tuple(inner(item) for item in of),
    "size": lambda of, _, __: torch.Size(of),
    "set": lambda of, inner, _: {inner(item) for item in of},
    "frozenset": lambda of, inner, _: frozenset(inner(item) for item in of),
    "dict": lambda of, inner, _: dict(_pairs(of, inner)),
    "ordered": lambda of, inner, _: collections.OrderedDict(_pairs(of, inner)),
    "counter": lambda of, inner, _: collections.Counter(dict(_pairs(of, inner))),
    "bytes": lambda of, _, __: base64.b64decode(of, validate=True),
    "bytearray": lambda of, _, __: bytearray(base64.b64decode(of, validate=True)),
    "dtype": lambda of, _, __: _dtype(of),
    "ndarray": lambda of, inner, _: inner(of).numpy(),
    "number": lambda of, inner, _: inner(of).numpy()[0],
}
