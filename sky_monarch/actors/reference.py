"""Results that stay where they were made: what a program holds of them is a reference."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sky_monarch.actors import serial
from sky_monarch.actors.folding import PLAN, fold
from sky_monarch.actors.future import VALUE, Answer, Future, failure, mesh_of
from sky_monarch.actors.runtime import CONTROL, runtime
from sky_monarch.actors.shape import Shaped
from sky_monarch.errors import SkyMonarchError, SupervisionError

if TYPE_CHECKING:
    from sky_monarch._core import ActorReplies, ActorRequest
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.folding import Plan
    from sky_monarch.actors.hosting import Hosted
    from sky_monarch.actors.region import Region
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["KEPT", "KEPT_BY", "Kept", "Ref", "keep", "serve"]

R = TypeVar("R")

#: In the name of a message: what it asks for stays there, or is about what stays there. Without a number behind it what
#: comes of it is folded with what others answer (`folding.py`).
KEPT = "&"
_GET, _DROP = f"{KEPT}get", f"{KEPT}drop"
#: What a process is asked that has made such a call: why another one has no value of it.
KEPT_BY = "kept"
#: Longest wait of an argument for the call that makes it.
_MADE_S = 60.0
#: The same where whoever has made that call has ended: what it had sent before may still be read.
_READ_S = 1.0
#: Calls that were made here are looked through when they are twice as many as the last time, and so many more.
_MORE = 64


class Kept:
    """What a process keeps for those who hold references to it, and what it knows of results that others keep."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, BaseException | None]] = {}
        self.changed = threading.Condition()
        self._makings: dict[int, _Making] = {}
        self._look_at = _MORE

    def put(self, number: int, value: Any, error: BaseException | None = None) -> None:
        """Keep a value, or why there is none."""
        with self.changed:
            self.values[number] = (value, error)
            self.changed.notify_all()

    def get(self, number: int, limit_s: float = 0.0, why: str = "it was dropped, or is not made yet") -> Any:
        """The value.

        Args:
            number: Of the call that makes it.
            limit_s: How long it is waited for, in seconds.
            why: It is not here, otherwise.

        Raises:
            SupervisionError: It is not here.
            BaseException: What the endpoint raised in its place.
        """
        end = time.monotonic() + limit_s
        with self.changed:
            while number not in self.values:
                left = end - time.monotonic()
                if left <= 0:
                    raise SupervisionError(f"the value of this reference is not here: {why}")
                self.changed.wait(left)
            value, error = self.values[number]
        if error is not None:
            raise error
        return value

    def drop(self, number: int) -> None:
        """Keep it no longer."""
        with self.changed:
            self.values.pop(number, None)

    def making(self, number: int, mesh: ActorMesh, replies: ActorReplies) -> _Making:
        """Remember a call of this process until all its actors have answered or ended, and as long as it is wanted."""
        with self.changed:
            if len(self._makings) >= self._look_at:
                self._makings = {at: one for at, one in self._makings.items() if not one.is_over()}
                self._look_at = 2 * len(self._makings) + _MORE
            made = self._makings[number] = _Making(mesh, replies)
            return made

    def tell(self, request: ActorRequest, number: int, rank: int) -> None:
        """Answer why a process has no value of a call, once it must have: when its rank has answered or ended."""
        with self.changed:
            making = self._makings.get(number)
        if making is None:
            request.reply(VALUE, *serial.dumps(_GONE))
        else:
            making.ask(request, rank)


_GONE = "it was dropped, or another process has the place of the one that has made it"


class _Making:
    """A call whose results stay with the actors, in the process that has made it."""

    def __init__(self, mesh: ActorMesh, replies: ActorReplies) -> None:
        self._mesh = mesh
        self._replies = replies
        self._called_s = time.monotonic()
        self._ends: dict[int, Answer] = {}
        self._asked: list[tuple[ActorRequest, int]] = []
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        """Whether every actor has answered or ended."""
        with self._lock:
            # Who waits for an answer is to see it first.
            return not self._asked and self._take() == len(self._mesh)

    def _take(self) -> int:
        self._ends.update((answer[0], answer) for answer in self._replies.take())
        return len(self._ends)

    def ask(self, request: ActorRequest, rank: int) -> None:
        """Tell ``request`` why there is no value of ``rank``, when its actor has answered or ended."""
        with self._lock:
            self._asked.append((request, self._mesh._region.ranks().index(rank)))
            if len(self._asked) > 1:
                return
        threading.Thread(target=self._tell, name="sky-monarch-kept", daemon=True).start()

    def _tell(self) -> None:
        while True:
            with self._lock:
                known = self._take()
                ready = [one for one in self._asked if one[1] in self._ends]
            for request, slot in ready:
                with suppress(SkyMonarchError):  # whoever asked has ended, or this process is ending
                    request.reply(VALUE, *serial.dumps(self._why(slot)))
            with self._lock:
                self._asked = [one for one in self._asked if one not in ready]
                if not self._asked:
                    return
            if ready:
                continue
            self._replies.wait(_MADE_S)
            with self._lock:
                if self._take() == known:  # whoever asks waits no longer, or this process is closing
                    self._asked.clear()
                    return

    def _why(self, slot: int) -> str:
        _, kind, body, buffers = self._ends[slot]
        if kind != VALUE:
            return str(failure(kind, body, buffers, self._mesh, slot, "rref"))
        found = self._mesh._failure_at(slot, self._called_s, 0.0)
        return _GONE if found is None else f"{self._mesh.name}[{self._mesh._rank_of(slot)}] is dead: {found}"


class Ref(Shaped, Generic[R]):
    """The results of one call, one in each process that was called.

    Passed to an endpoint, it arrives as that process's own result where that process has made one, without having been
    anywhere else; everywhere else as a reference. The results are kept until :meth:`drop`, or until their process ends.
    """

    def __init__(self, mesh: ActorMesh, number: int, caller: str) -> None:
        self._mesh = mesh
        self._number = number
        self._caller = caller

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
        return Ref(self._mesh._with_region(region), self._number, self._caller)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._mesh, self._number, self._caller)

    def __repr__(self) -> str:
        return f"<Ref to results of {self._mesh!r}>"


def _arrive(mesh: ActorMesh, number: int, caller: str) -> Any:
    """What a reference is in this process."""
    here = runtime()
    rank = mesh._rank_at(here.address)
    if rank is None:
        return Ref(mesh, number, caller)
    if number in here.kept.values:
        return here.kept.get(number)
    # Whoever has called hears of the end of the process that was to make it, and knows whether that has made it.
    from sky_monarch._core import ActorTargets

    asked = here.node.call(ActorTargets([(caller, "")]), CONTROL, KEPT_BY, *serial.dumps((number, rank)))
    if not asked.wait(_MADE_S):
        return here.kept.get(number, 0.0, f"{mesh.name}[{rank}] has not made it within {_MADE_S:g} s")
    (_, kind, body, buffers) = asked.take()[0]
    if kind != VALUE:
        return here.kept.get(number, _READ_S, f"{mesh.name}[{rank}] has none, and who asked for it has ended")
    return here.kept.get(number, 0.0, serial.loads(body, buffers))


def serve(hosted: Hosted, request: ActorRequest, method: str, body: Any, buffers: list[Any]) -> None:
    """Handle a message about what is kept, in the actor's turn. Its endpoint is a function."""
    kept = hosted.runtime.kept
    try:
        args, kwargs = serial.loads(body, buffers)
        if method == _DROP:
            kept.drop(args[0])
            return
        if method == _GET:
            request.reply(VALUE, *serial.dump_result(kept.get(args[0])))
            return
    except BaseException as error:  # noqa: BLE001  (the caller is told)
        hosted.refuse(request, error)
        return
    name, _, number = method.partition(KEPT)
    place = request.open()[1]
    token = hosted.enter(place) if place else None
    plan = kwargs.pop(PLAN, None)
    try:
        keep(hosted, request, number, hosted._methods[name](*args, **kwargs), plan)
    except BaseException as error:  # noqa: BLE001  (who waits for it is told)
        keep(hosted, request, number, None, error=error)
    finally:
        if token is not None:
            from sky_monarch.actors.context import current

            current.reset(token)


def keep(
    hosted: Hosted,
    request: ActorRequest,
    number: str,
    value: Any,
    plan: Plan | None = None,
    *,
    error: BaseException | None = None,
) -> None:
    """Keep what an endpoint returned or raised, and its caller hears that it is done; or have it folded by a plan."""
    if number:
        hosted.runtime.kept.put(int(number), value, error)
    if error is not None:
        hosted.refuse(request, error)
    elif plan is not None:
        fold(hosted, request, plan, value)
    else:
        request.reply(VALUE, *serial.dumps(None))


def reference(mesh: ActorMesh, method: str, payload: serial.Body) -> Ref[Any]:
    """Call ``method`` of every actor of ``mesh``; what comes of it stays there."""
    import os

    number = int.from_bytes(os.urandom(7), "big") + 1
    here = runtime()
    here.kept.making(number, mesh, mesh._call(mesh._targets(), f"{method}{KEPT}{number}", payload, each=True))
    return Ref(mesh, number, here.address)
