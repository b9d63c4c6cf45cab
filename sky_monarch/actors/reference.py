"""Results that stay where they were made: what a program holds of them is a reference."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sky_monarch.actors import serial
from sky_monarch.actors.future import VALUE, Future, mesh_of
from sky_monarch.actors.runtime import runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.hosting import Hosted
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["KEPT", "Kept", "Ref", "keep", "serve"]

R = TypeVar("R")

#: In the name of a message: what it asks for stays there, or is about what stays there.
KEPT = "&"
_GET, _DROP = f"{KEPT}get", f"{KEPT}drop"
#: Longest wait of an argument for the call that makes it.
_MADE_S = 60.0


class Kept:
    """What a process keeps for those who hold references to it."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, BaseException | None]] = {}
        self.changed = threading.Condition()

    def put(self, number: int, value: Any, error: BaseException | None = None) -> None:
        """Keep a value, or why there is none."""
        with self.changed:
            self.values[number] = (value, error)
            self.changed.notify_all()

    def get(self, number: int, limit_s: float = _MADE_S) -> Any:
        """The value; what makes it is waited for.

        Raises:
            SkyMonarchError: It is not made in that time, or was dropped.
            BaseException: What the endpoint raised in its place.
        """
        end = time.monotonic() + limit_s
        with self.changed:
            while number not in self.values:
                left = end - time.monotonic()
                if left <= 0:
                    raise SkyMonarchError("the value of this reference was dropped, or is not made yet")
                self.changed.wait(left)
            value, error = self.values[number]
        if error is not None:
            raise error
        return value

    def drop(self, number: int) -> None:
        """Keep it no longer."""
        with self.changed:
            self.values.pop(number, None)


class Ref(Shaped, Generic[R]):
    """The results of one call, one in each process that was called.

    Passed to an endpoint, it arrives as that process's own result where that process has made one, without having been
    anywhere else; everywhere else as a reference. The results are kept until :meth:`drop`, or until their process ends.
    """

    def __init__(self, mesh: ActorMesh, number: int, made: Future[Any] | None = None) -> None:
        self._mesh = mesh
        self._number = number
        self._made = made

    def get(self, timeout: float | None = None) -> ValueMesh[R]:
        """Fetch the results.

        Raises:
            ActorError: The endpoint raised.
            SupervisionError: A process is dead.
            TimeoutError: They are not there yet.
        """
        return self.fetch().get(timeout)

    def fetch(self) -> Future[ValueMesh[R]]:
        """Ask for the results."""
        mesh = self._mesh
        replies = mesh._call(mesh._targets(), _GET, serial.dump_call((self._number,), {}))
        return Future(replies, mesh_of, mesh, "rref")

    def drop(self) -> None:
        """Have the results forgotten, behind what was sent to these actors before."""
        try:
            self._mesh._send(self._mesh._targets(), _DROP, serial.dump_call((self._number,), {}))
        except SupervisionError:
            return  # with their process they are gone

    @property
    def _region(self) -> Region:
        return self._mesh._region

    def _with_region(self, region: Region) -> Ref[R]:
        return Ref(self._mesh._with_region(region), self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._mesh, self._number)

    def __repr__(self) -> str:
        return f"<Ref to results of {self._mesh!r}>"


def _arrive(mesh: ActorMesh, number: int) -> Any:
    """What a reference is in this process."""
    found = runtime()
    if found.address in mesh._called():
        return found.kept.get(number)
    return Ref(mesh, number)


def serve(hosted: Hosted, request: ActorRequest, method: str, body: Any, buffers: list[Any]) -> None:
    """Handle a message about what is kept, in the actor's turn. Its endpoint is a function."""
    kept = hosted.runtime.kept
    try:
        args, kwargs = serial.loads(body, buffers)
        if method == _DROP:
            kept.drop(args[0])
            return
        if method == _GET:
            request.reply(VALUE, *serial.dump_result(kept.get(args[0], 0.0)))
            return
    except BaseException as error:  # noqa: BLE001  (the caller is told)
        hosted.refuse(request, error)
        return
    name, _, number = method.partition(KEPT)
    place = request.open()[1]
    token = hosted.enter(place) if place else None
    try:
        keep(hosted, request, int(number), hosted._methods[name](*args, **kwargs))
    except BaseException as error:  # noqa: BLE001  (who waits for it is told)
        keep(hosted, request, int(number), None, error)
    finally:
        if token is not None:
            from sky_monarch.actors.context import current

            current.reset(token)


def keep(
    hosted: Hosted, request: ActorRequest, number: int, value: Any, error: BaseException | None = None
) -> None:
    """Keep what an endpoint returned or raised; its caller hears that it is done."""
    hosted.runtime.kept.put(number, value, error)
    if error is not None:
        hosted.refuse(request, error)
    else:
        request.reply(VALUE, *serial.dumps(None))


def reference(mesh: ActorMesh, method: str, payload: serial.Body) -> Ref[Any]:
    """Call ``method`` of every actor of ``mesh``; what comes of it stays there."""
    import os

    number = int.from_bytes(os.urandom(7), "big") + 1
    replies = mesh._call(mesh._targets(), f"{method}{KEPT}{number}", payload)
    return Ref(mesh, number, Future(replies, mesh_of, mesh, method))
