"""Answers that are on their way."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sky_monarch.actors import serial
from sky_monarch.actors.context import current
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import ActorError, DeadlockError, SupervisionError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from sky_monarch._core import ActorNotifier, ActorReplies
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.value_mesh import ValueMesh

__all__ = ["ERROR", "FAILED", "VALUE", "Answer", "Future", "failure", "raise_first"]

R = TypeVar("R")

#: Kinds of answers: what the endpoint returned, what it raised, and why the actor cannot answer any more.
VALUE, ERROR, FAILED = 0, 1, 2
#: Several threads may wait for one future: one of them reads the answer, for so long at the most.
_UNPACKED_S, _LOOK_S = 60.0, 0.001
_DEAD, _THROWN_AWAY = -1, 255

#: After so long a wait its actors are asked what they are doing.
_WORTH_ASKING_S = 1.0
#: How a process has ended is known so long after its connections have.
_REPORTED_S = 0.5

Answer = tuple[int, int, Any, "list[Any]"]
_PENDING = object()


class Future(Generic[R]):
    """An answer that is on its way: ``.get(timeout)`` in plain code, ``await`` in coroutines.

    Leaving it alone costs nothing: the endpoint runs all the same. Cancelling it (or the task that awaits it) takes the
    message back where it still waits, and cancels the coroutine that works on it; a function that runs, runs on.
    """

    __slots__ = ("_cancelled", "_error", "_mesh", "_method", "_replies", "_settle", "_value")

    def __init__(
        self,
        replies: ActorReplies | _Turn,
        settle: Callable[[list[Answer], ActorMesh, str], Any],
        mesh: ActorMesh,
        method: str,
    ) -> None:
        self._replies = replies
        self._settle = settle
        self._mesh = mesh
        self._method = method
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._cancelled = False

    @classmethod
    def ready(cls, value: R) -> Future[R]:
        """One whose answer is there already."""
        made: Future[R] = cls.__new__(cls)
        made._value, made._error, made._cancelled = value, None, False
        return made

    def get(self, timeout: float | None = None) -> R:
        """Wait for the answer and return it.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            ActorError: The endpoint raised. The cause is its exception, with the traceback that it has there.
            SupervisionError: The process, or the actor, is dead.
            DeadlockError: This actor would wait for itself.
            TimeoutError: There is no answer yet. It may be waited for again. Where ``timeout`` is a second or more, it
                says what the actors are doing.
        """
        if self._value is _PENDING and self._error is None:
            replies = self._replies
            if not replies.is_ready():
                self._check_deadlock()
                # A deadline that has passed is no mistake, nor is one that never comes.
                limit = None if timeout is None or timeout == math.inf else max(0.0, timeout)
                if not replies.wait(limit):
                    raise TimeoutError(self._no_answer(timeout))
            self._finish()
        return self._result()

    def __await__(self) -> Generator[Any, None, R]:
        if self._value is _PENDING and self._error is None:
            if not self._replies.is_ready():
                self._check_deadlock(self._method)
                from sky_monarch.actors.loops import wait_for

                try:
                    yield from wait_for(self._replies).__await__()
                except BaseException:  # the task that awaits is cancelled
                    self.cancel()
                    raise
            self._finish()
        return self._result()

    def done(self) -> bool:
        """True where ``get`` would not wait."""
        return self._value is not _PENDING or self._error is not None or self._replies.is_ready()

    def cancel(self) -> bool:
        """Want no answer any more. False where it is there already."""
        if self.done():
            return False
        self._cancelled = True
        self._replies.cancel()
        return True

    def cancelled(self) -> bool:
        """True where it was cancelled before the answer came."""
        return self._cancelled

    def _no_answer(self, timeout: float | None) -> str:
        words = f"{self._mesh.name}.{self._method} gave no answer within {timeout} s"
        # Who waits in short turns does not want to wait for more.
        look = (
            getattr(self._mesh, "_doings", None)
            if timeout is not None and timeout >= _WORTH_ASKING_S
            else None
        )
        return words + (look() if look is not None else "")

    def _check_deadlock(self, awaited: str | None = None) -> None:
        hosted = current.get().hosted
        if hosted is None or not hosted.would_wait_for_itself(self._mesh, awaited):
            return
        raise DeadlockError(
            f"{self._mesh.name}.{self._method} is called by the same actor, which would wait for itself for ever",
            hint="call the method directly, await it in a concurrent endpoint, or send it by broadcast()",
        )

    def _finish(self) -> None:
        if self._cancelled:
            from concurrent.futures import CancelledError

            self._error = CancelledError(f"the call of {self._mesh.name}.{self._method} was cancelled")
            return
        answers = self._replies.take()
        if not answers:
            self._finished_by_another()
            return
        try:
            self._value = self._settle(answers, self._mesh, self._method)
        except Exception as error:  # noqa: BLE001  (it is raised below, each time that it is asked for)
            # Where it was made is of no interest: who waits for it is shown, and in its cause where it was raised.
            self._error = error.with_traceback(None)
        except BaseException as error:
            self._error = error  # whoever waits beside this one has to hear of something
            raise

    def _finished_by_another(self) -> None:
        """Wait for whoever waits for the same future, and has taken the answer: a coroutine, or another thread."""
        end = time.monotonic() + _UNPACKED_S
        while self._value is _PENDING and self._error is None:
            if time.monotonic() > end:
                raise TimeoutError(f"the answer of {self._mesh.name}.{self._method} is still being read")
            time.sleep(_LOOK_S)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a Future ({self._mesh.name}.{self._method}) is of the process that called: "
            "send what get() returns, or the Ref that rref() returns"
        )

    def _result(self) -> R:
        if self._error is not None:
            raise self._error
        return cast("R", self._value)


def one_of(answers: list[Answer], mesh: ActorMesh, method: str) -> Any:
    """The value of the only answer."""
    slot, kind, body, buffers = answers[0]
    if kind == VALUE:
        return serial.loads(body, buffers)
    raise failure(kind, body, buffers, mesh, slot, method)


def mesh_of(answers: list[Answer], mesh: ActorMesh, method: str) -> ValueMesh[Any]:
    """The values of all ranks. Where one has failed, its failure: the others are not waited for then."""
    from sky_monarch.actors.value_mesh import ValueMesh

    raise_first(answers, mesh, method)
    return ValueMesh(mesh.extent, [serial.loads(body, buffers) for _, _, body, buffers in answers])


def raise_first(answers: list[Answer], mesh: ActorMesh, method: str) -> None:
    """Sort answers by rank. Where one is no value, raise what the first such rank says."""
    answers.sort(key=lambda answer: answer[0])
    failed = [answer for answer in answers if answer[1] != VALUE]
    if failed:
        slot, kind, body, buffers = failed[0]
        error = failure(kind, body, buffers, mesh, slot, method)
        if len(failed) > 1:
            error.add_note(f"{len(failed) - 1} other ranks failed too")
        raise error


class _Turn:
    """The answer that comes ``index``-th, as a future sees it."""

    __slots__ = ("arrived", "index", "replies")

    def __init__(self, replies: ActorReplies, arrived: list[Answer], index: int) -> None:
        self.replies = replies
        self.arrived = arrived
        self.index = index

    def is_ready(self) -> bool:
        if len(self.arrived) <= self.index:
            self.arrived.extend(self.replies.take())
        return len(self.arrived) > self.index

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready():
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self.replies.wait(left):
                return False
        return True

    def take(self) -> list[Answer]:
        return [self.arrived[self.index]]

    def notify(self, notifier: ActorNotifier, token: int) -> None:
        self.replies.notify(notifier, token)

    def cancel(self) -> None:
        """The others may still be wanted: nothing is taken back."""


def each_of(replies: ActorReplies, mesh: ActorMesh, method: str) -> Iterator[Future[Any]]:
    """A future for each answer, in the order in which they come."""
    arrived: list[Answer] = []
    turns = (_Turn(replies, arrived, index) for index in range(len(mesh)))
    return (Future(turn, one_of, mesh, method) for turn in turns)


def failure(
    kind: int, body: Any, buffers: list[Any], mesh: ActorMesh, slot: int, method: str
) -> ActorError | SupervisionError:
    """What an answer that is no value says."""
    who = f"{mesh.name}[{mesh._rank_of(slot)}]"
    if kind in (ERROR, FAILED):
        remote: RemoteError = serial.loads(body, buffers)
        of = f"{who}.{method} raised" if kind == ERROR else f"{who} has failed:"
        words = f"{of} {remote.kind}: {remote.words} ({remote.where}, pid {remote.pid} on {remote.host})"
        error: ActorError | SupervisionError = ActorError(words) if kind == ERROR else SupervisionError(words)
        error.__cause__ = remote.exception()
        return error
    if kind == _THROWN_AWAY:
        return SupervisionError(f"{who} was stopped before it came to {method}")
    (called_s,) = buffers
    found = mesh._failure_at(slot, called_s, time.monotonic() + _REPORTED_S)
    if found is not None:
        gone = SupervisionError(f"{who} is dead: {found}")
        if found.last_lines:
            gone.add_note("its last lines:\n" + "\n".join(f"  | {line}" for line in found.last_lines))
        return gone
    return SupervisionError(f"{who} is dead: {body}")
