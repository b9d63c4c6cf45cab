"""Channels: whoever holds the port sends, from any process; one process receives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sky_monarch.actors import serial
from sky_monarch.actors.future import ERROR, VALUE, Future
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.actors.runtime import runtime
from sky_monarch.errors import ActorError, SupervisionError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from sky_monarch._core import ActorMailbox, ActorNotifier
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.endpoint import Endpoint
    from sky_monarch.actors.future import Answer

__all__ = ["Accumulator", "Channel", "Port", "PortReceiver"]

T = TypeVar("T")
A = TypeVar("A")
_VALUE, _EXCEPTION = "value", "exception"


class Port(Generic[T]):
    """The sending end of a channel. It may be sent to other processes."""

    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._number = number

    def send(self, value: T) -> None:
        """Send ``value``. Values of one thread arrive in their order.

        Raises:
            SupervisionError: The receiving process is gone.
            ChannelTimeoutError: The receiver takes nothing, and what waits for it has no room for more.
        """
        self._send(_VALUE, serial.dump_result(value))

    def exception(self, error: BaseException) -> None:
        """Have ``error`` raised by ``recv``. Raises what :meth:`send` raises."""
        self._send(_EXCEPTION, serial.dumps(RemoteError.of(error)))

    def _send(self, kind: str, payload: serial.Body) -> None:
        from sky_monarch._core import ActorTargets

        lost = runtime().node.send(ActorTargets([(self._address, "")]), self._number, kind, *payload)
        if lost:
            raise SupervisionError(f"the receiver of this port is gone: {lost[0][1]}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Port, (self._address, self._number)


class PortReceiver(Generic[T]):
    """The receiving end. It stays in the process that has opened the channel."""

    def __init__(self, mailbox: ActorMailbox) -> None:
        self._mailbox = mailbox
        self._pid = os.getpid()
        self._notifier: ActorNotifier | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: In their order: who has waited longest has the next value.
        self._waiting: dict[asyncio.Future[None], None] = {}

    @property
    def name(self) -> str:
        """What errors call it."""
        return "channel"

    def recv(self) -> Future[T]:
        """Ask for the next value; get it from the future, or await that."""
        return Future(cast("Any", _Next(self)), _received, cast("ActorMesh", self), "recv")

    def close(self) -> None:
        """Take nothing more: what waits, and what is sent from now on, is thrown away."""
        self._mailbox.close()

    def __reduce__(self) -> Any:
        raise TypeError("a PortReceiver stays in the process that has opened its channel: send the Port")

    def __del__(self) -> None:
        # Nobody can receive any more: what is sent is not to stop its senders. A forked child has only a copy.
        if self._pid == os.getpid():
            self._mailbox.close()

    async def _arrival(self) -> None:
        """Wait until something may have arrived."""
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            from sky_monarch._core import ActorNotifier

            self._loop, self._notifier = loop, ActorNotifier()
            loop.add_reader(self._notifier.fileno(), self._wake)
            self._mailbox.notify(self._notifier)
        waiting = loop.create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def _wake(self) -> None:
        assert self._notifier is not None  # noqa: S101  (it is what woke us)
        self._notifier.drain()
        for waiting in list(self._waiting):
            if not waiting.done():
                waiting.set_result(None)


class _Next:
    """The next message of a receiver, as a future sees it."""

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        self.receiver = receiver
        self.answer: Answer | None = None

    def is_ready(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        if self.answer is None:
            for request in self.receiver._mailbox.recv(timeout, 1):
                if not isinstance(request, tuple):
                    kind, _, body, buffers = request.open()
                    self.answer = (0, VALUE if kind == _VALUE else ERROR, body, buffers)
            if self.answer is None and self.receiver._mailbox.closed:
                self.answer = (0, -1, "the channel is closed", [])
        return self.answer is not None

    def take(self) -> list[Answer]:
        assert self.answer is not None  # noqa: S101  (taken once it is ready)
        return [self.answer]

    async def wait_async(self) -> None:
        while not self.is_ready():
            await self.receiver._arrival()

    def cancel(self) -> None:
        """Nobody has been asked for anything: the value stays for the next ``recv``."""


def _received(answers: list[Answer], mesh: Any, method: str) -> Any:
    _, kind, body, buffers = answers[0]
    if kind == VALUE:
        return serial.loads(body, buffers)
    if kind == ERROR:
        remote: RemoteError = serial.loads(body, buffers)
        words = f"{mesh.name}: {method} got {remote.kind}: {remote.words} (sent at {remote.where})"
        raise ActorError(words) from remote.exception()
    raise SupervisionError(str(body))


class Channel(Generic[T]):
    """``port, receiver = Channel[int].open()``."""

    @staticmethod
    def open() -> tuple[Port[T], PortReceiver[T]]:
        """A fresh channel, received in this process."""
        node = runtime().node
        number = int.from_bytes(os.urandom(7), "big") + 1
        return Port(node.address, number), PortReceiver(node.mailbox(number))


class Accumulator(Generic[A]):
    """Combines the answers of a mesh.

    Where it is declared ``associative``, the answers of each other host are combined there, in the process of its first
    rank, and one value for each host comes back: ``combine(combine(a, b), c)`` has to be ``combine(a, combine(b, c))``.
    They are then combined in the order of the ranks, whatever that of their coming, and one rank that fails ends it for
    all, as of ``call``.

    Args:
        endpoint: What is called.
        identity: What the first answer is combined with.
        combine: Takes what has been combined and one answer. In any order: it should not depend on that.
        associative: It may also take two things that have been combined, of lower and of higher ranks. It is called in
            processes of the mesh too, so it is sent there.
    """

    def __init__(
        self,
        endpoint: Endpoint[..., Any],
        identity: A,
        combine: Callable[[A, Any], A],
        *,
        associative: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine
        self._associative = associative

    def accumulate(self, *args: Any, **kwargs: Any) -> A:
        """Call the endpoint on every actor of its mesh and combine the answers. Raises what ``Future.get`` raises."""
        if self._associative:
            return cast("A", self._endpoint._reduced(self._identity, self._combine, args, kwargs))
        total = self._identity
        for answer in self._endpoint.stream(*args, **kwargs):
            total = self._combine(total, answer.get())
        return total
