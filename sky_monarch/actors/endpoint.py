"""An endpoint: on the class the mark of a method, on a mesh what calls it there."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from sky_monarch.actors import serial
from sky_monarch.actors.future import Future, each_of, mesh_of, one_of
from sky_monarch.actors.signature import Signature
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.reference import Ref
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["Endpoint"]

P = ParamSpec("P")
R = TypeVar("R")


class Endpoint(Generic[P, R]):
    """Something that the actors of a mesh can be asked for.

    Arguments and results are pickled; arrays and bytes of 64 KiB or more go through shared memory.
    """

    def __init__(self, method: Callable[..., Any], *, concurrent: bool = False) -> None:
        self.__wrapped__ = method
        self.__name__ = getattr(method, "__name__", "endpoint")
        self.__doc__ = method.__doc__
        self.concurrent = concurrent
        self._mesh: ActorMesh | None = None
        self._signature: Signature | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    if TYPE_CHECKING:
        # Type checkers take a mesh for the class of its actors, so what they see there is the endpoint.
        def __get__(self, instance: object, owner: type | None = None) -> Self: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
            """Of an actor: its own method."""

    else:

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            return self.__wrapped__.__get__(instance, owner)

    def of(self, mesh: ActorMesh) -> Endpoint[P, R]:
        """The same endpoint of a mesh."""
        bound: Endpoint[P, R] = Endpoint(self.__wrapped__, concurrent=self.concurrent)
        bound.__name__ = self.__name__
        bound._mesh = mesh
        bound._signature = self._known_signature
        return bound

    @property
    def _known_signature(self) -> Signature:
        if self._signature is None:
            self._signature = Signature(self.__wrapped__)
        return self._signature

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> serial.Body:
        """The arguments, for their way. Raises TypeError where the endpoint does not take them."""
        self._known_signature.check(self.__name__, args, kwargs)
        return serial.dump_call(args, kwargs)

    @property
    def _target(self) -> ActorMesh:
        if self._mesh is None:
            raise ConfigError(
                f"{self.__name__} is called on a mesh of actors, not on their class",
                hint="spawn one: procs.spawn(name, Class)",
            )
        return self._mesh

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mesh is None:
            return Endpoint._marked, (self.__wrapped__, self.concurrent, self.__name__)
        return getattr, (self._mesh, self.__name__)

    @staticmethod
    def _marked(method: Callable[..., Any], concurrent: bool, name: str) -> Endpoint[..., Any]:
        made: Endpoint[..., Any] = Endpoint(method, concurrent=concurrent)
        made.__name__ = name
        return made

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call it on every actor of the mesh; the answers come as a mesh of values.

        Raises:
            TypeError: It does not take these arguments; here at once, as of all ways to call it.
        """
        mesh = self._target
        replies = mesh._call(mesh._targets(), self.__name__, self._packed(args, kwargs))
        return Future(replies, mesh_of, mesh, self.__name__)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on the one actor of the mesh.

        Raises:
            ValueError: The mesh has several.
            TypeError: As of :meth:`call`.
        """
        mesh = self._target
        targets = mesh._targets()
        if len(targets) != 1:
            raise ValueError(
                f"call_one is for a mesh of one actor; {mesh.name} has {len(targets)}, in {mesh.extent!r}: "
                "choose one with .slice(), or use .call() or .choose()"
            )
        replies = mesh._call(targets, self.__name__, self._packed(args, kwargs))
        return Future(replies, one_of, mesh, self.__name__)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on one actor of the mesh, whichever: a random one."""
        mesh = self._target
        one = mesh._one(random.randrange(len(mesh)))  # noqa: S311  (nobody is kept out by it)
        replies = mesh._call(one._targets(), self.__name__, self._packed(args, kwargs))
        return Future(replies, one_of, one, self.__name__)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call it on every actor; iterate over futures in the order in which the answers come."""
        mesh = self._target
        replies = mesh._call(mesh._targets(), self.__name__, self._packed(args, kwargs), each=True)
        return each_of(replies, mesh, self.__name__)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Ref[R]:
        """Call it on every actor; the results stay with them, and may be passed to others by reference."""
        from sky_monarch.actors.reference import reference

        return reference(self._target, self.__name__, self._packed(args, kwargs))

    def _reduced(
        self, identity: Any, combine: Callable[[Any, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call it on every actor; the answers are combined on their way. See :class:`Accumulator`."""
        from sky_monarch.actors.folding import reduce

        self._known_signature.check(self.__name__, args, kwargs)
        return reduce(self._target, self.__name__, (args, kwargs), identity, combine)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send it to every actor; wait for no answer. Where it raises there, the actor fails, and its owner hears."""
        mesh = self._target
        mesh._send(mesh._targets(), self.__name__, self._packed(args, kwargs))
