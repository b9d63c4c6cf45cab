"""The event loop of an actor that has coroutines, or endpoints that run beside others, among its endpoints."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.folding import PLAN
from sky_monarch.actors.hosting import STOP, SUPERVISE
from sky_monarch.actors.reference import KEPT, keep

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.hosting import Hosted

__all__ = ["serve"]

#: Functions called in a row before other tasks have their turn.
_IN_A_ROW = 16
_BATCH = 1024
#: Functions of one actor that run at the same time; more wait for one of them. Threads start when they are needed.
_MOST_THREADS = 256


def serve(hosted: Hosted) -> None:
    """Handle the messages of ``hosted`` until it stops."""
    asyncio.run(_Loop(hosted).run())


class _Loop:
    """Which messages run. Most of it happens in callbacks of the loop: no task waits for a message."""

    def __init__(self, hosted: Hosted) -> None:
        from sky_monarch._core import ActorNotifier

        self.hosted = hosted
        hosted.loop = self
        endpoints = type(hosted.instance)._endpoints
        self.concurrent = {name for name, one in endpoints.items() if one.concurrent}
        self.functions = {
            name for name, one in endpoints.items() if not inspect.iscoroutinefunction(one.__wrapped__)
        }
        self.queue: deque[ActorRequest] = deque()
        self.serial: asyncio.Task[bool] | None = None
        self.tasks: dict[tuple[int, int], asyncio.Task[Any]] = {}
        self.closed = False
        self.cleaning: asyncio.Task[None] | None = None
        self.notifier = ActorNotifier()
        # Not the loop's own, which has a few threads only: they may all wait for what one more is to do.
        self.pool = ThreadPoolExecutor(_MOST_THREADS, f"actor-{hosted.name}")

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.loop.add_reader(self.notifier.fileno(), self.arrive)
        self.hosted.mailbox.notify(self.notifier)
        try:
            await self.over
        finally:
            self.loop.remove_reader(self.notifier.fileno())
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            if self.cleaning is not None:
                await self.cleaning
            self.pool.shutdown(wait=False, cancel_futures=True)

    def arrive(self) -> None:
        """Take what has arrived: cancellations and concurrent messages at once, the others in their order."""
        self.notifier.drain()
        for request in self.hosted.mailbox.recv(0.0, _BATCH):
            if isinstance(request, tuple):
                self.cancel(request)
            elif request.method in self.concurrent and self.hosted.failed is None:
                self.tasks[request.key] = task = self.loop.create_task(self.beside(request))
                task.add_done_callback(partial(self.forget, request.key))
            else:
                self.queue.append(request)
        self.closed = self.hosted.mailbox.closed
        self.work()

    def work(self) -> None:
        """Start the next message, unless one is under way."""
        in_a_row = 0
        while self.queue and self.serial is None and not self.over.done():
            if in_a_row == _IN_A_ROW:
                self.loop.call_soon(self.work)
                return
            request = self.queue.popleft()
            if request.method in self.functions and self.hosted.failed is None:
                # It may run a loop of its own, as in an actor that has no coroutines.
                asyncio._set_running_loop(None)
                try:
                    self.hosted.handle(request)
                finally:
                    asyncio._set_running_loop(self.loop)
                in_a_row += 1
                continue
            self.serial = self.tasks[request.key] = self.loop.create_task(self.alone(request))
            self.serial.add_done_callback(partial(self.done, request.key))
        if self.closed and self.serial is None and not self.over.done():
            self.over.set_result(None)

    def done(self, key: tuple[int, int], task: asyncio.Task[bool]) -> None:
        self.tasks.pop(key, None)
        self.serial = None
        goes_on = task.cancelled() or task.exception() is not None or task.result()
        if not goes_on and not self.over.done():
            self.over.set_result(None)
        self.work()

    def goes_on(self, method: str) -> bool:
        """Whether an answer of this actor to ``method`` may come while the running code awaits it."""
        if asyncio._get_running_loop() is not self.loop:
            return False  # of a function, which keeps the actor's own loop from running
        return method in self.concurrent or asyncio.current_task() is not self.serial

    def clean_up_later(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Complete ``__cleanup__`` of an actor that has failed, on the loop that it has lived on."""

        async def clean_up() -> None:
            try:
                await coroutine
            except BaseException:  # noqa: BLE001  (it ends all the same)
                traceback.print_exc()

        self.cleaning = self.loop.create_task(clean_up())

    def forget(self, key: tuple[int, int], _: asyncio.Task[Any]) -> None:
        self.tasks.pop(key, None)

    def cancel(self, key: tuple[int, int]) -> None:
        task = self.tasks.get(key)
        if task is not None:
            task.cancel()
            return
        for request in self.queue:
            if request.key == key:
                self.queue.remove(request)
                return

    async def alone(self, request: ActorRequest) -> bool:
        """One message, with none but concurrent ones beside it; False where it was the last one."""
        hosted = self.hosted
        method, place, body, buffers = request.open()
        found = hosted._methods.get(method)
        if found is not None and hosted.failed is None:
            await self.answer(request, found, place, body, buffers)
            return True
        if method == STOP:
            await self.clean_up()
        if method == SUPERVISE:
            await self.supervise(serial.loads(body, buffers))
            return True
        name, kept, number = method.partition(KEPT)
        made = hosted._methods.get(name)
        if kept and name not in self.functions and made is not None and hosted.failed is None:
            await self.keep(request, made, number, place, body, buffers)
            return True
        return hosted.handle_other(request, method, body, buffers)

    async def keep(
        self, request: ActorRequest, found: Any, number: str, place: str, body: Any, buffers: Any
    ) -> None:
        """A coroutine whose result stays here, or is folded with others."""
        if place:
            self.hosted.enter(place)  # a task has a context of its own
        try:
            args, kwargs = serial.loads(body, buffers)
            plan = kwargs.pop(PLAN, None)
            keep(self.hosted, request, number, await found(*args, **kwargs), plan)
        except BaseException as error:  # noqa: BLE001  (who waits for it is told)
            keep(self.hosted, request, number, None, error=error)

    async def answer(self, request: ActorRequest, found: Any, place: str, body: Any, buffers: Any) -> None:
        if place:
            self.hosted.enter(place)  # a task has a context of its own
        try:
            args, kwargs = serial.loads(body, buffers)
            answer = serial.dump_result(await found(*args, **kwargs))
        except asyncio.CancelledError as error:
            self.hosted.refuse(request, error) if request.wants_answer else None
        except BaseException as error:  # noqa: BLE001  (the caller is told)
            self.hosted.refuse(request, error)
        else:
            self.hosted.answer(request, *answer)

    async def beside(self, request: ActorRequest) -> None:
        """One message of a concurrent endpoint."""
        method, place, body, buffers = request.open()
        found = self.hosted._methods[method]
        if not inspect.iscoroutinefunction(found):
            function = found

            async def found(*args: Any, **kwargs: Any) -> Any:
                run = partial(copy_context().run, function, *args, **kwargs)
                return await self.loop.run_in_executor(self.pool, run)

        await self.answer(request, found, place, body, buffers)

    async def supervise(self, failure: Any) -> None:
        handler = getattr(self.hosted.instance, "__supervise__", None)
        try:
            handled = handler(failure) if handler is not None else False
            if inspect.isawaitable(handled):
                handled = await handled
            if handled:
                return
        except BaseException:  # noqa: BLE001  (a handler that raises, or wants to exit, has not handled it)
            traceback.print_exc()
        self.hosted.runtime.tell_owner(self.hosted.owner, failure)

    async def clean_up(self) -> None:
        """An asynchronous ``__cleanup__`` runs on the loop that the actor has lived on."""
        hosted = self.hosted
        handler = getattr(hosted.instance, "__cleanup__", None)
        if handler is None or not inspect.iscoroutinefunction(handler):
            return
        try:
            await handler(None)
        except BaseException:  # noqa: BLE001  (it ends all the same)
            traceback.print_exc()
        hosted.instance = None
