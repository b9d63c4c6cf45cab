"""What a process says about itself when it is asked: what an actor is doing, and the stacks of all threads.

Asked over its control mailbox, which a thread of its own serves: so also while its actors are stuck. A process that
holds the interpreter's lock answers nothing; there the one that has started it sends a signal, which
:mod:`faulthandler` answers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.future import VALUE
from sky_monarch.errors import SupervisionError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.hosting import Hosted
    from sky_monarch.actors.runtime import Runtime

__all__ = ["answer", "doings", "stacks_of"]

_HERE = os.path.dirname(__file__)  # noqa: PTH120  (pathlib costs its import)
_OURS = (_HERE, threading.__file__)
#: A process that is asked what it does, and a mesh of them in all.
_ASK_S = 0.5
#: Ranks that the text of an error has room for.
_MOST_RANKS = 3
_POLL_S = 0.02


# --- in the process that is asked -------------------------------------------------------------------


def answer(runtime: Runtime, method: str, argument: Any) -> Any:
    """Answer one question: ``doing`` (of an actor's number), ``stacks`` or ``breakpoints``."""
    if method == "stacks":
        return all_stacks(runtime)
    if method == "doing":
        hosted = runtime.hosted.get(argument)
        return None if hosted is None else {"pid": os.getpid(), "host": runtime.host, "text": doing(hosted)}
    from sky_monarch.actors import breakpoints

    breakpoints.enable(runtime, argument)
    return None


def doing(hosted: Hosted) -> str | None:
    """Where an actor is in the program's own code; None where it is not there."""
    found = [_place(frames) for frames in _working(hosted)]
    return "; ".join(place for place in found if place) or None


def _working(hosted: Hosted) -> list[traceback.StackSummary]:
    ident = hosted._thread.ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stacks = [] if frame is None else [traceback.extract_stack(frame)]
    return stacks + [_stack_of(task) for task in _tasks_of(hosted)]


def _tasks_of(hosted: Hosted) -> list[Any]:
    return [] if hosted.loop is None else list(hosted.loop.tasks.values())


def _stack_of(task: Any) -> traceback.StackSummary:
    return traceback.StackSummary.extract((one, one.f_lineno) for one in _frames_of(task))


def _frames_of(task: Any) -> Iterable[FrameType]:
    """Of a coroutine that waits, from the outermost inwards."""
    waiting = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            return
        yield frame
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _place(frames: traceback.StackSummary) -> str | None:
    """The innermost line of the program, behind those that have called it, as text."""
    loops = [getattr(sys.modules.get(name), "__file__", None) for name in ("asyncio", "selectors")]
    ours = (*_OURS, *(file.removesuffix("__init__.py") for file in loops if file))
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    if not theirs:
        return None
    last = theirs[-1]
    via = next((f" (called at {frame.filename}:{frame.lineno})" for frame in theirs[-2:-1]), "")
    return f"{last.filename}:{last.lineno} in {last.name}{f': {last.line}' if last.line else ''}{via}"


def all_stacks(runtime: Runtime) -> str:
    """The stacks of all threads, and of the coroutines that wait."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()} ({sys.argv[0]}) on {runtime.host}"]
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    for hosted in list(runtime.hosted.values()):
        waiting = (_stack_of(task).format() for task in _tasks_of(hosted))
        parts.extend(f"coroutine of {hosted.name}:\n{''.join(lines)}" for lines in waiting)
    return "\n".join(parts)


# --- in the process that asks ------------------------------------------------------------------------


def ask(
    runtime: Runtime, addresses: list[str], method: str, argument: Any, limit_s: float
) -> list[tuple[int, Any]]:
    """What the processes at ``addresses`` answer within ``limit_s``, with their place in that list."""
    from sky_monarch._core import ActorTargets

    targets = ActorTargets([(address, "") for address in addresses])
    replies = runtime.node.call(targets, 0, method, serial.dump_whole(argument), None, True)
    end = time.monotonic() + limit_s
    found: list[tuple[int, Any]] = []
    while len(found) < len(addresses) and replies.wait(max(0.0, end - time.monotonic())):
        for slot, kind, body, buffers in replies.take():
            found.append((slot, serial.loads(body, buffers) if kind == VALUE else None))
    return found


def doings(mesh: ActorMesh, runtime: Runtime) -> str:
    """What the actors of ``mesh`` are doing, for the text of an error. Takes half a second at the most."""
    addresses = mesh._addresses_of()
    if not addresses:
        return ""
    answers = dict(ask(runtime, addresses, "doing", mesh._actor_id, _ASK_S))
    busy: list[str] = []
    for slot in range(len(addresses)):
        who = f"{mesh.name}[{mesh._rank_of(slot)}]"
        found = answers.get(slot)
        if slot not in answers:
            busy.append(f"{who}: its process does not answer; see stacks({slot})")
        elif found is not None and found["text"]:
            busy.append(f"{who} (pid {found['pid']} on {found['host']}) is at {found['text']}")
    more = len(busy) - _MOST_RANKS
    return "".join(f"; {one}" for one in busy[:_MOST_RANKS]) + (f"; and {more} more" if more > 0 else "")


def stacks_of(runtime: Runtime, addresses: tuple[str, ...], rank: int, name: str, limit_s: float) -> str:
    """The stacks of the process of ``rank``, whatever it is doing.

    Raises:
        SupervisionError: It is dead, or says nothing within ``limit_s``.
    """
    for _, text in ask(runtime, [addresses[rank]], "stacks", None, limit_s / 2):
        if text is None:
            raise SupervisionError(f"{name}[{rank}] is dead")
        return str(text)
    from sky_monarch.actors.proc_mesh import find_owner

    owned = find_owner(addresses)
    pid = None if owned is None else owned.procs[rank].pid
    if pid is None:
        raise SupervisionError(
            f"{name}[{rank}] does not answer within {limit_s / 2} s",
            hint="ask in the process that has started it: there it can be sent a signal",
        )
    return _by_signal(addresses[rank], pid, f"{name}[{rank}]", limit_s / 2)


def stacks_file(address: str) -> str:
    """Where the process at ``address`` writes its stacks when it gets the signal."""
    return f"{address}.stacks"


def _by_signal(address: str, pid: int, who: str, limit_s: float) -> str:
    from sky_monarch import stacks

    path = stacks_file(address)
    try:
        before = os.path.getsize(path)  # noqa: PTH202
        os.kill(pid, stacks.SIGNAL)
    except OSError as error:
        raise SupervisionError(f"{who} (pid {pid}) cannot be asked: {error}") from error
    end = time.monotonic() + limit_s
    text = b""
    while time.monotonic() < end:
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(before)
            now = file.read()
        # It writes line after line; what has not grown for a moment is all of it.
        if now and now == text:
            return f"process {pid} (by signal)\n{text.decode(errors='replace')}"
        text = now
        time.sleep(_POLL_S)
    raise SupervisionError(
        f"{who} (pid {pid}) says nothing within {limit_s} s: it is stopped, or inside of the kernel"
    )
