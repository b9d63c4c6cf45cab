"""Tensors as bytes beside a pickle's body, as arrays travel: torch's own pickling writes each into the body, twice.

Only what lies in the host's memory and is nothing but its bytes; all else is left to torch.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["reducers"]

#: Smaller ones go torch's way: they are in the body anyway.
_LEAST = 4096

_reducers: dict[type, Callable[[Any], Any]] = {}


def reducers() -> dict[type, Callable[[Any], Any]]:
    """How tensors are reduced, by their type; nothing where this process has not imported torch."""
    if not _reducers:
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is None:
            return {}
        # Parameters are reduced to tensors by torch; other subclasses know themselves what they are.
        _reducers[tensor] = _reduce
    return _reducers


def _reduce(tensor: Any) -> Any:
    flat = _flat(tensor) if _is_bytes(tensor) else None
    if flat is None:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    buffer, stride = flat
    return _tensor, (
        pickle.PickleBuffer(buffer),
        tensor.dtype,
        tuple(tensor.shape),
        stride,
        tensor.requires_grad,
    )


def _is_bytes(tensor: Any) -> bool:
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return False
    if (
        tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
    ):
        return False
    # Of numbers of eight bits torch reads not what it has written.
    eight_bits = tensor.dtype.is_floating_point and tensor.element_size() == 1
    return eight_bits or bool(tensor.numel() * tensor.element_size() >= _LEAST)


def _flat(tensor: Any) -> tuple[Any, tuple[int, ...]] | None:
    """The elements as an array of bytes, in the order of memory where they lie without gaps; and their strides."""
    import torch

    here = tensor.detach()
    gaps = _gaps(tensor.shape, tensor.stride())
    if gaps is None:
        return None  # elements that lie on each other
    if gaps:
        here = here.contiguous()
    try:
        return here.as_strided((here.numel(),), (1,)).view(torch.uint8).numpy(), here.stride()
    except RuntimeError:  # no numpy here, or a dtype that cannot be seen as bytes
        return None


def _gaps(shape: Any, strides: Any) -> bool | None:
    """Whether there is something between the elements; None where one lies on another."""
    wide = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    length, count = 1, 1  # from the first to the last element so far, and how many those are
    for stride, size in wide:
        if stride < length:
            return None
        length += stride * (size - 1)
        count *= size
    return length != count


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool) -> Any:
    import torch

    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    # Not a view of the bytes: autograd would look for what it is a view of.
    made = torch.empty(0, dtype=dtype).set_(memory, 0, shape, stride)
    return made.requires_grad_() if grad else made
