"""Follows a run from a terminal: streams in, view out, and what Ctrl-C means."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._events import is_failure
from sky_monarch.cli._output import say
from sky_monarch.errors import ChannelError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.cli._view import View
    from sky_monarch.launch.folder import RunFolder
    from sky_monarch.sdk import Run
    from sky_monarch.sdk.types import Event, LogLine, RunStatus

__all__ = ["choose_view", "follow"]

_QUEUE_ITEMS = 5_000
_BATCH_ITEMS = 500
_STATUS_EVERY_S = 0.5


class _End:
    """A stream has ended."""


def choose_view(*, json: bool) -> View:
    """The view that fits stdout."""
    from sky_monarch.cli import _view

    if json:
        return _view.JsonView()
    return _view.LiveView() if _output.is_terminal() else _view.PlainView()


class _Streams:
    """Events, log lines and status of a run, read by one thread each into one bounded queue."""

    def __init__(self, folder: RunFolder, *, logs: bool, tail: int | None, after: int) -> None:
        from sky_monarch.sdk import Run

        self._new_run: Callable[[], Run] = lambda: Run(folder)
        self.items: queue.Queue[Event | LogLine | _End] = queue.Queue(_QUEUE_ITEMS)
        self.status: RunStatus | None = None
        self.errors: list[SkyMonarchError] = []
        self._over = threading.Event()
        self.open = 1 + int(logs)
        self._start(lambda run: self._pump(run.events(after=after, follow=True)))
        if logs:
            self._start(lambda run: self._pump(run.logs(follow=True, tail=tail)))
        self._start(self._poll)

    def _start(self, work: Callable[[Run], None]) -> None:
        def body() -> None:
            with self._new_run() as run:
                try:
                    work(run)
                except SkyMonarchError as error:
                    self.errors.append(error)

        threading.Thread(target=body, name="follow", daemon=True).start()

    def _put(self, item: Event | LogLine | _End) -> None:
        while not self._over.is_set():
            try:
                self.items.put(item, timeout=0.5)
            except queue.Full:
                continue  # the terminal is slow: the controller waits for us, nothing is dropped
            return

    def _pump(self, source: Iterator[Event | LogLine]) -> None:
        try:
            for item in source:
                self._put(item)
                if self._over.is_set():
                    return
        finally:
            self._put(_End())

    def _poll(self, run: Run) -> None:
        while not self._over.wait(_STATUS_EVERY_S):
            try:
                self.status = run.status()
            except ChannelError as error:
                self.errors.append(error)

    def batch(self, timeout_s: float) -> list[Event | LogLine | _End]:
        """What has come, at most a screenful of screens; empty after ``timeout_s``."""
        found = []
        try:
            found.append(self.items.get(timeout=timeout_s))
            while len(found) < _BATCH_ITEMS:
                found.append(self.items.get_nowait())
        except queue.Empty:
            pass
        return found

    def close(self) -> None:
        """Let the threads go; they are daemons and hold nothing."""
        self._over.set()


def _ask(view: View) -> str:
    """Ask once what Ctrl-C meant: ``stop``, ``detach`` or ``continue``."""
    view.pause()
    try:
        sys.stderr.write("\nstop the run? [y]es / [d]etach / [c]ontinue: ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        say("")
        return "stop"
    finally:
        view.resume()
    if not answer:  # end of input, or just Enter: do no harm
        return "continue"
    return {"y": "stop", "d": "detach"}.get(answer[0], "continue")


class _Stop:
    """Ends the run beside the main loop, which goes on showing what happens.

    Args:
        folder: Of the run.
        grace_s: Seconds between TERM and KILL.
        pressed: What asked for it.
    """

    def __init__(self, folder: RunFolder, grace_s: float, pressed: KeyboardInterrupt) -> None:
        from sky_monarch.sdk import Run

        self.error: SkyMonarchError | None = None
        self.exit_code = _code(pressed)
        reason = _name(pressed)

        def body() -> None:
            with Run(folder) as run:
                try:
                    run.down(grace_s=grace_s, reason=reason)
                except SkyMonarchError as error:
                    self.error = error

        self._thread = threading.Thread(target=body, name="down", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()


def _name(pressed: KeyboardInterrupt) -> str:
    return "SIGTERM" if isinstance(pressed, _output.Terminated) else "Ctrl-C"


def _code(pressed: KeyboardInterrupt) -> int:
    return _output.TERMINATED if isinstance(pressed, _output.Terminated) else _output.INTERRUPTED


def follow(
    run: Run,
    view: View,
    *,
    logs: bool = True,
    tail: int | None = None,
    after: int = 0,
    owner: bool = True,
    grace_s: float = 10.0,
) -> RunStatus:
    """Show a run until it ends.

    Args:
        run: Which one.
        view: How.
        logs: Whether to show log lines.
        tail: Begin with the last lines of each process; None: with all of them.
        after: Begin after this event.
        owner: SIGTERM, and Ctrl-C without a terminal to ask on, stop the run; otherwise they only leave.
        grace_s: Seconds between TERM and KILL when one of them stops it.

    Returns:
        The final status; its report has been shown.

    Raises:
        typer.Exit: With 130 or 143: Ctrl-C or SIGTERM stopped or left the run.
        BrokenPipeError: The reader of stdout is gone; the run goes on.
    """
    streams = _Streams(run.folder, logs=logs, tail=tail, after=after)
    stop: _Stop | None = None
    pressed: KeyboardInterrupt | None = None
    try:
        with _output.sigterm_raises():
            while True:
                # One more may come while the one before is answered, or between two turns: none is lost.
                try:
                    if pressed is not None:
                        answered, pressed = pressed, None
                        stop = _answer(run, view, answered, stop, owner=owner, grace_s=grace_s)
                    while not _turn(streams, view, stop):
                        pass
                    break
                except KeyboardInterrupt as again:
                    pressed = again
            status = _final(run, stop)
            failures = (
                [] if status.state == "SUCCEEDED" else [event for event in run.events() if is_failure(event)]
            )
            view.finish(status, failures)
    except BrokenPipeError:
        if stop is None and not run.over:
            say(f"nobody reads the output any more; the run goes on: sky-monarch attach {run.name}")
        raise
    finally:
        streams.close()
        view.pause()
    if stop is not None:
        raise typer.Exit(stop.exit_code)
    return status


def _answer(
    run: Run, view: View, pressed: KeyboardInterrupt, stop: _Stop | None, *, owner: bool, grace_s: float
) -> _Stop | None:
    """Do what Ctrl-C or SIGTERM asked for; returns what stops the run, where something does.

    Raises:
        typer.Exit: It was to leave, or it was pressed again while the run is stopped.
    """
    if stop is not None:
        say(f"still stopping; `sky-monarch down {run.name}` finishes it")
        raise typer.Exit(_code(pressed))
    choice = _choice(view, pressed, owner=owner)
    if choice == "detach":
        say(f"detached; the run goes on: sky-monarch attach {run.name}")
        raise typer.Exit(_code(pressed))
    if choice == "continue":
        return None
    say(f"{_name(pressed)}: stopping {run.run_id} …")
    return _Stop(run.folder, grace_s, pressed)


def _choice(view: View, pressed: KeyboardInterrupt, *, owner: bool) -> str:
    if sys.stdin.isatty() and sys.stderr.isatty() and not isinstance(pressed, _output.Terminated):
        return _ask(view)
    return "stop" if owner else "detach"


def _turn(streams: _Streams, view: View, stop: _Stop | None) -> bool:
    """Show what has come; True once both streams have ended."""
    items: list[Event | LogLine] = []
    for item in streams.batch(0.1):
        if isinstance(item, _End):
            streams.open -= 1
        else:
            items.append(item)
    if items:
        view.show(items)
    while streams.errors:
        say(f"notice: {streams.errors.pop(0)}")
    if streams.status is not None:
        view.update(streams.status)
    return streams.open == 0 or (stop is not None and stop.over and not items)


def _final(run: Run, stop: _Stop | None) -> RunStatus:
    if stop is not None:
        stop.join()
        if stop.error is not None:
            say(f"error: {stop.error}")
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return run.wait(timeout_s=60.0)
        except ChannelError:
            # The streams have ended, so this is a controller that neither answers nor dies.
            if time.monotonic() > deadline:
                raise
