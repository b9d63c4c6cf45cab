"""What an attached terminal shows while a run goes on: a live table, plain lines, or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from sky_monarch.cli import _events, _report
from sky_monarch.cli._output import number, plain, print_json, print_line, seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from sky_monarch.sdk.types import Event, LogLine, RunStatus

__all__ = ["JsonView", "LiveView", "PlainView", "View"]


class View(Protocol):
    """Shows what a follower brings."""

    def show(self, items: Iterable[Event | LogLine]) -> None:
        """Show what happened and what was printed, in order."""

    def update(self, status: RunStatus) -> None:
        """Take the latest status."""

    def pause(self) -> None:
        """Leave the terminal alone (for a question)."""

    def resume(self) -> None:
        """Go on."""

    def finish(self, status: RunStatus, failures: list[Event]) -> None:
        """Show how it ended."""


class PlainView:
    """Lines, for pipes and files: no control sequences, nothing redrawn."""

    def show(self, items: Iterable[Event | LogLine]) -> None:
        """Write each on its own line."""
        from sky_monarch.sdk.types import Event

        for item in items:
            if isinstance(item, Event):
                if not _events.is_routine(item):
                    print_line(_events.line(item))
            else:
                print_line(plain(f"{item.prefix} {item.line}"))
        sys.stdout.flush()

    def update(self, status: RunStatus) -> None:
        """The events tell it all."""

    def pause(self) -> None:
        """Nothing is redrawn."""

    def resume(self) -> None:
        """Nothing is redrawn."""

    def finish(self, status: RunStatus, failures: list[Event]) -> None:
        """Recovery report, failure, result."""
        for text in _report.recovery_lines(status):
            print_line(text)
        if status.cost_usd:
            for text in _report.host_lines(status):
                print_line(text)
        if status.state not in ("SUCCEEDED", "CANCELLED"):
            for text in _report.failure_lines(status, failures):
                print_line(text)
        for text in _report.rehearsal_lines(status):
            print_line(text)
        print_line(_report.result_line(status))
        sys.stdout.flush()


class JsonView(PlainView):
    """NDJSON: one event a line, then one final status."""

    def show(self, items: Iterable[Event | LogLine]) -> None:
        """Write the events."""
        from sky_monarch.sdk.types import Event

        for item in items:
            if isinstance(item, Event):
                print_json(item.to_json(), indent=None)

    def finish(self, status: RunStatus, failures: list[Event]) -> None:  # noqa: ARG002
        """The final status."""
        print_json(status.to_json(), indent=None)


class LiveView(PlainView):
    """A table that is redrawn below the lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._status: RunStatus | None = None
        self._drawn_s = 0.0
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, items: Iterable[Event | LogLine]) -> None:
        """Print above the table, all in one go: each print redraws the table."""
        from rich.text import Text

        from sky_monarch.sdk.types import Event

        block = Text()
        for item in items:
            if isinstance(item, Event) and _events.is_routine(item):
                continue
            if block:
                block.append("\n")
            if isinstance(item, Event):
                block.append(_events.line(item), "bold red" if _events.is_failure(item) else "cyan")
            else:
                # A progress bar rewrites its line with \r: its last state is what a terminal would show.
                text = item.line.rstrip("\r").rsplit("\r", 1)[-1]
                block.append(f"{item.prefix} ", "dim").append_text(Text.from_ansi(text))
        if block:
            self._console.print(block)

    def update(self, status: RunStatus) -> None:
        """Redraw, five times a second at most."""
        self._status = status
        now = time.monotonic()
        if now - self._drawn_s >= 0.2:
            self._drawn_s = now
            self._live.update(self._table(status), refresh=True)

    def pause(self) -> None:
        """Take the table away."""
        self._live.stop()

    def resume(self) -> None:
        """Draw it again."""
        self._live.start()

    def finish(self, status: RunStatus, failures: list[Event]) -> None:
        """Leave the last table on the screen, then say how it ended."""
        self._live.stop()
        if status.groups:
            self._console.print(self._table(status))
        super().finish(status, failures)

    @staticmethod
    def _table(status: RunStatus) -> Table:
        from rich.table import Table

        goal = "" if status.target_step is None else f"/{status.target_step}"
        title = (
            f"{status.name}  {status.state}  step {number(status.step)}{goal}  {seconds(status.elapsed_s)}"
        )
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for header in (
            "GROUP",
            "GENERATION",
            "STATE",
            "STEP",
            "LOSS",
            "QUORUM",
            "IN IT",
            "STEPS/S",
            "RESTARTS",
        ):
            table.add_column(header, justify="left" if header == "STATE" else "right")
        for group in status.groups:
            left = "" if group.restarts_left is None else f" ({group.restarts_left} left)"
            table.add_row(
                str(group.replica),
                str(group.generation),
                group.state,
                number(group.step),
                number(group.loss),
                number(group.quorum_id),
                number(group.participants),
                number(group.rate, 2),
                f"{group.restarts}{left}",
                style=None if group.state in ("RUNNING", "DONE") else "yellow",
            )
        return table
