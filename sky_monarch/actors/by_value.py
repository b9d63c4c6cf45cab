"""Pickling by value what another process cannot import, with the names of the files that it comes from.

cloudpickle leaves those out; with them a remote traceback shows the lines of the program.
"""

from __future__ import annotations

import io
import os
from collections import ChainMap
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as _inner

from sky_monarch.actors.tensor_bytes import reducers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["dumps"]

_NO_FILE = "<dynamic-code>"
#: Known once torch is there.
_tensors: dict[type, Callable[[Any], Any]] = {}


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, args = _inner._code_reduce(code)
    file = code.co_filename
    if not file.startswith("<"):
        file = os.path.abspath(file)  # noqa: PTH100
    return make, tuple(file if arg == _NO_FILE else arg for arg in args)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, _tensors, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any, buffer_callback: Callable[[Any], Any] | None = None) -> bytes:
    """``value`` in pickle 5."""
    with io.BytesIO() as file:
        _tensors.update(reducers())
        _Pickler(file, 5, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()
