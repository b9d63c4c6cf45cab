"""Values as bytes: pickle 5, with large buffers beside the body.

What plain pickle can do, it does: it is several times as fast. Functions and classes of ``__main__``, which another
process would look for in its own ``__main__``, and whatever plain pickle refuses go by value, through cloudpickle.

Only processes of this mesh are read: they have shown its secret before.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INLINE", "Body", "dump_call", "dump_result", "dump_whole", "dumps", "loads"]

#: Buffers of so many bytes or more travel beside the body, in shared memory on one host.
INLINE = 64 * 1024

Body = tuple[bytes, "list[memoryview] | None"]

#: Values that hold neither buffers nor anything that is looked for by its name: plain pickle, in half the time.
_PLAIN = frozenset({bool, float, int, str, type(None)})


class _Large:
    """Large bytes, which pickle would otherwise copy into its body."""

    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        kind = _whole if type(self.value) is bytes else bytearray
        return kind, (pickle.PickleBuffer(self.value),)


def _whole(buffer: Any) -> bytes:
    """What large bytes are made of again."""
    from sky_monarch._core import actor_bytes

    return actor_bytes(buffer)


def _is_large(value: Any) -> bool:
    kind = type(value)
    return (kind is bytes or kind is bytearray) and len(value) >= INLINE


def _apart(value: Any) -> Any:
    """``value`` with large bytes wrapped, where they are easy to find: itself, or in a list, tuple or dict."""
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return _Large(value) if len(value) >= INLINE else value
    if (kind is tuple or kind is list) and any(map(_is_large, value)):
        return kind(_Large(item) if _is_large(item) else item for item in value)
    if kind is dict and any(map(_is_large, value.values())):
        return {key: _Large(item) if _is_large(item) else item for key, item in value.items()}
    return value


class _Table(dict[type, Any]):
    """Of a pickler: what is reduced in our way, before what everybody is told of."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


def _pickled(value: Any, apart: Callable[[Any], Any] | None = None) -> bytes:
    if "torch" not in sys.modules:
        return pickle.dumps(value, 5, buffer_callback=apart)
    from sky_monarch.actors.tensor_bytes import reducers

    with io.BytesIO() as file:
        pickler = pickle.Pickler(file, 5, buffer_callback=apart)
        pickler.dispatch_table = _Table(reducers())
        pickler.dump(value)
        return file.getvalue()


def dumps(value: Any) -> Body:
    """The body of ``value``, and its buffers where it has large ones."""
    buffers: list[memoryview] = []

    def apart(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: its owner copies it into the body
            return True
        if raw.nbytes < INLINE:
            return True
        buffers.append(raw)
        return False

    try:
        body = _pickled(value, apart)
    except (pickle.PicklingError, AttributeError, TypeError):
        body = b"__main__"
    if b"__main__" in body:
        from sky_monarch.actors import by_value

        buffers.clear()
        body = by_value.dumps(value, apart)
    return body, buffers or None


def dump_whole(value: Any) -> bytes:
    """A body without buffers beside it, to be part of another value."""
    try:
        body = _pickled(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        body = b"__main__"
    if b"__main__" in body:
        from sky_monarch.actors import by_value

        body = by_value.dumps(value)
    return body


def dump_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Body:
    """The body of a call's arguments."""
    if not kwargs:
        for value in args:
            if type(value) not in _PLAIN:
                break
        else:
            return pickle.dumps((args, kwargs), 5), None
    return dumps((_apart(args), _apart(kwargs) if kwargs else kwargs))


def dump_result(value: Any) -> Body:
    """The body of what an endpoint returned."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5), None
    return dumps(_apart(value))


def loads(body: Any, buffers: list[Any] | None = None) -> Any:
    """The value of a body."""
    if buffers:
        return pickle.loads(body, buffers=buffers)  # noqa: S301  (see above)
    return pickle.loads(body)  # noqa: S301  (as above)
