"""What a user's actor is made of: the base class, and the mark of an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, overload

from sky_monarch.actors.endpoint import Endpoint
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from typing import Concatenate, ParamSpec, Self, TypeVar

    from sky_monarch.actors.failure import MeshFailure
    from sky_monarch.actors.future import Future
    from sky_monarch.actors.shape import Extent

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["RESERVED", "Actor", "concurrent_endpoint", "endpoint"]

#: What a mesh of actors can do itself: no endpoint may have such a name.
RESERVED = frozenset(
    {
        "extent",
        "flatten",
        "initialized",
        "name",
        "rename",
        "respawn",
        "size",
        "sizes",
        "slice",
        "split",
        "stop",
    }
)


class Actor:
    """Base of every actor: an object in a process of its own, or one that it shares with others.

    Its endpoints run one message at a time, in the order in which each sender has sent them. ``__init__`` runs before
    the first one, ``__cleanup__(exc)`` (sync or async) after the last one; ``__supervise__(failure)`` hears of the end
    of what this actor has spawned, and returns True where that is dealt with.
    """

    _endpoints: ClassVar[dict[str, Endpoint[..., Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Endpoint)
        }
        cls._endpoints = {name: value for name, value in found.items() if getattr(cls, name, None) is value}
        for name in cls._endpoints:
            if name in RESERVED or name.startswith("_"):
                raise ConfigError(
                    f"{cls.__qualname__}.{name} cannot be an endpoint: meshes of actors have that name themselves",
                    hint=f"rename it, for example to {name.strip('_')}_",
                )

    if TYPE_CHECKING:  # what the mesh can do, which `spawn` returns under the name of this class

        @property
        def name(self) -> str:
            """The name that the mesh was given."""

        @property
        def initialized(self) -> Future[None]:
            """Done when every actor is made."""

        @property
        def extent(self) -> Extent:
            """Names and sizes of the dimensions."""

        @property
        def sizes(self) -> dict[str, int]:
            """Sizes of the dimensions, by name."""

        def size(self, dim: str | Sequence[str] | None = None) -> int:
            """How many actors there are along a dimension, or in all."""

        def slice(self, /, **selection: int | slice) -> Self:
            """A part of the mesh."""

        def flatten(self, name: str) -> Self:
            """The same actors along one dimension."""

        def split(self, /, **parts: Sequence[str] | int) -> Self:
            """Split dimensions, each into several."""

        def rename(self, /, **names: str) -> Self:
            """Rename dimensions."""

        def respawn(self, ranks: int | Iterable[int], timeout: float = 60.0) -> None:
            """Replace the process of a rank, or of several."""

        def stop(self) -> Future[None]:
            """End the actors."""

        def __len__(self) -> int: ...
        def __supervise__(self, failure: MeshFailure) -> bool: ...


@overload
def endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> Endpoint[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...
@overload
def endpoint(*, concurrent: bool = False) -> Callable[[Callable[Concatenate[Any, P], R]], Endpoint[P, R]]: ...
def endpoint(method: Any = None, /, *, concurrent: bool = False) -> Any:
    """Mark a method as one that can be called from other processes.

    Args:
        method: A function or a coroutine function.
        concurrent: It may run while others do: coroutines on the actor's event loop, functions in a pool of threads. It
            starts when it arrives, so it may overtake messages that wait.

    Raises:
        ConfigError: It is not callable.
    """
    if method is None:
        return lambda method: Endpoint(method, concurrent=concurrent)
    if not callable(method):
        raise ConfigError(
            f"@endpoint marks a method, not {method!r}", hint="write @endpoint, or @endpoint(concurrent=True)"
        )
    return Endpoint(method, concurrent=concurrent)


def concurrent_endpoint(method: Any, /) -> Any:
    """The same as ``@endpoint(concurrent=True)``."""
    return Endpoint(method, concurrent=True)
