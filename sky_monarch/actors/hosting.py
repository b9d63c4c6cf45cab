"""One actor in the process where it runs: its thread, its messages, its end."""

from __future__ import annotations

import inspect
import os
import threading
import traceback
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.context import Context, current, point_at
from sky_monarch.actors.failure import MeshFailure
from sky_monarch.actors.future import ERROR, FAILED, VALUE
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.extent import Point
    from sky_monarch.actors.runtime import Runtime

__all__ = ["STOP", "Hosted"]

STOP = "__stop__"
SUPERVISE = "__supervise__"


class Hosted:
    """An actor, as its process knows it.

    Args:
        runtime: Of this process.
        actor_id: Its number, the same in every process of its mesh.
        name: Of its mesh.
        owner: Address and number of the actor that spawned it; number 0 where no actor did.
        point: Where it stands in its mesh.
        made: Class, arguments and keyword arguments, pickled.
        request: Who asked for it, and waits for it to be made.
    """

    def __init__(
        self,
        runtime: Runtime,
        actor_id: int,
        name: str,
        owner: tuple[str, int],
        point: Point,
        made: bytes,
        request: ActorRequest,
    ) -> None:
        self.runtime = runtime
        self.actor_id = actor_id
        self.name = name
        self.owner = owner
        self.point = point
        self.instance: Any = None
        self.loop: Any = None  # of an actor that has one, see looping.py
        self.failed: serial.Body | None = None
        self.mailbox = runtime.node.mailbox(actor_id)
        self._made: bytes | None = made
        self._request: ActorRequest | None = request
        self._context = Context(message_rank=point, actor_name=name, hosted=self)
        self._methods: dict[str, Callable[..., Any]] = {}
        self._thread = threading.Thread(target=self._run, name=f"actor-{name}", daemon=True)

    def start(self) -> None:
        """Make the actor, in its own thread, and serve its mailbox."""
        self.runtime.hosted[self.actor_id] = self
        self._thread.start()

    def join(self, limit_s: float) -> None:
        """Wait for its end, so long at the most."""
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)

    def would_wait_for_itself(self, mesh: ActorMesh, awaited: str | None = None) -> bool:
        """True where this code, waiting for an answer of ``mesh``, keeps that from being made.

        Args:
            mesh: That was called.
            awaited: The endpoint, where a coroutine awaits it; None where the thread itself waits.
        """
        if threading.current_thread() is not self._thread:
            return False
        own = getattr(mesh, "_actor_id", None) == self.actor_id
        here = own and mesh._rank_at(self.runtime.address) is not None
        return here and (awaited is None or self.loop is None or not self.loop.goes_on(awaited))

    def ask_to_stop(self) -> None:
        """Have it end after the messages that wait."""
        from sky_monarch._core import ActorTargets

        if not self.mailbox.closed:
            target = ActorTargets([(self.runtime.address, "")])
            self.runtime.node.send(target, self.actor_id, STOP, *serial.dump_call((), {}))

    # --- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        current.set(self._context)
        request, made = self._request, self._made
        self._request = self._made = None
        assert request is not None and made is not None  # noqa: PT018, S101  (set above, taken once)
        try:
            cls, args, kwargs = serial.loads(made)
            self.instance = cls(*args, **kwargs)
            self._methods = {name: getattr(self.instance, name) for name in cls._endpoints}
            looping = any(
                one.concurrent or inspect.iscoroutinefunction(one.__wrapped__)
                for one in cls._endpoints.values()
            )
        except BaseException as error:  # noqa: BLE001  (whoever asked is told, and all who call it)
            request.reply(FAILED, *self.fail(error))
            looping = False
        else:
            request.reply(VALUE, *serial.dumps(None))
        del request, made
        try:
            if looping:
                from sky_monarch.actors.looping import serve

                serve(self)
            else:
                self._serve()
        finally:
            self.mailbox.close()
            self.runtime.hosted.pop(self.actor_id, None)

    def _serve(self) -> None:
        recv = self.mailbox.recv
        while True:
            messages = recv()
            if not messages and self.mailbox.closed:
                return
            for number, request in enumerate(messages, 1):
                # The answers to what came together leave together: the last one takes the others along.
                soon = number < len(messages)
                if not isinstance(request, tuple) and not self.handle(request, soon=soon):
                    return

    def handle(self, request: ActorRequest, *, soon: bool = False) -> bool:
        """Handle one message in this thread; False where it was the last one.

        Args:
            request: The message.
            soon: Its answer may leave a moment later, together with others.
        """
        method, place, body, buffers = request.open()
        found = self._methods.get(method)
        if found is None or self.failed is not None:
            return self.handle_other(request, method, body, buffers)
        token = self.enter(place) if place else None
        try:
            args, kwargs = serial.loads(body, buffers)
            answer, segments = serial.dump_result(found(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  (the caller is told)
            self.refuse(request, error)
        else:
            self.answer(request, answer, segments, soon=soon)
        finally:
            if token is not None:
                current.reset(token)
        return True

    def enter(self, place: str) -> Any:
        """Set the context of a message that was sent to a part of the mesh."""
        return current.set(Context(message_rank=point_at(place), actor_name=self.name, hosted=self))

    def answer(
        self, request: ActorRequest, body: bytes, buffers: list[memoryview] | None, *, soon: bool = False
    ) -> None:
        """Answer with what an endpoint returned; where that cannot be sent, with why."""
        try:
            request.reply(VALUE, body, buffers, soon)
        except Exception as error:  # noqa: BLE001  (no memory, no descriptor, too large: the actor goes on)
            self.refuse(request, error)

    def refuse(self, request: ActorRequest, error: BaseException) -> None:
        """An endpoint raised: its caller is told; where none waits, the actor has failed."""
        if not request.wants_answer:
            self.fail(error)
            return
        try:
            request.reply(ERROR, *serial.dumps(RemoteError.of(error)))
        except SkyMonarchError:
            traceback.print_exc()  # whoever asked cannot be reached, and hears of that by itself

    def handle_other(self, request: ActorRequest, method: str, body: Any, buffers: list[Any]) -> bool:
        """Messages that are no endpoint's, and those of a failed actor."""
        from sky_monarch.actors.reference import KEPT
        from sky_monarch.actors.reference import serve as serve_kept

        if method == STOP:
            self.clean_up(None)
            self.mailbox.close()
            request.reply(VALUE, *serial.dumps(None))
            return False
        if method == SUPERVISE:
            self.supervise(serial.loads(body, buffers))
        elif KEPT in method and self.failed is None:
            serve_kept(self, request, method, body, buffers)
        elif self.failed is not None:
            request.reply(FAILED, *self.failed)
        else:
            error = SkyMonarchError(f"{self.name} has no endpoint {method}")
            request.reply(ERROR, *serial.dumps(RemoteError.of(error)))
        return True

    # --- failure and end -----------------------------------------------------------------------------

    def supervise(self, failure: MeshFailure) -> None:
        """Something that this actor spawned has failed: it handles that, or it climbs."""
        handled = getattr(self.instance, "__supervise__", None)
        try:
            if handled is not None and self.complete(handled(failure)):
                return
        except BaseException:  # noqa: BLE001  (a handler that raises, or wants to exit, has not handled it)
            traceback.print_exc()
        self.runtime.tell_owner(self.owner, failure)

    def complete(self, result: Any) -> Any:
        """The value of what may be a coroutine."""
        if not inspect.iscoroutine(result):
            return result
        import asyncio

        return asyncio.run(result)

    def fail(self, error: BaseException) -> serial.Body:
        """The actor can answer no more; its owner is told. Returns what it answers from now on."""
        remote = RemoteError.of(error)
        self.failed = serial.dumps(remote)
        failure = MeshFailure(
            mesh_name=self.name,
            actors=(self.name,),
            rank=self.point.rank,
            host=self.runtime.host,
            pid=os.getpid(),
            reason=f"raised {remote.kind}: {remote.words} ({remote.where})",
            last_lines=tuple("".join(traceback.format_exception(error)).splitlines()[-20:]),
        )
        self.clean_up(error)
        try:
            self.runtime.tell_owner(self.owner, failure)
        except SkyMonarchError:
            traceback.print_exc()  # the owner is gone; what is printed still reaches the program
        return self.failed

    def clean_up(self, error: BaseException | None) -> None:
        """Let the actor put things in order."""
        handler = getattr(self.instance, "__cleanup__", None)
        self.instance = None if error is not None else self.instance
        if handler is None:
            return
        try:
            result = handler(error)
            if self.loop is not None and inspect.iscoroutine(result):
                self.loop.clean_up_later(result)
            else:
                self.complete(result)
        except BaseException:  # noqa: BLE001  (it ends all the same)
            traceback.print_exc()
