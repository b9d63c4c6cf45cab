"""How the CLI speaks: results on stdout, everything else on stderr, JSON that always parses."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from sky_monarch.cli._coercion import check_plainly
from sky_monarch.errors import SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.config import Checked

__all__ = [
    "Commands",
    "Terminated",
    "columns",
    "is_terminal",
    "money",
    "number",
    "open_standard_streams",
    "plain",
    "print_json",
    "print_line",
    "say",
    "say_resumed",
    "say_warnings",
    "seconds",
    "sigterm_raises",
    "use_json",
    "write_bytes",
]

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM  # as a shell reports it
_BROKEN_PIPE = 141  # what a shell reports of a process that SIGPIPE ended

_NUMBERS = re.compile(r"\[Errno -?\d+\] | \(os error \d+\)")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def open_standard_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed (``>&-``).

    Otherwise Python has no such stream at all, and the next file or socket gets its number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class _Mode:
    """What the global options and the running command chose."""

    debug = False
    json = False
    json_printed = False


def use_debug() -> None:
    """Show tracebacks."""
    _Mode.debug = True


def use_json(chosen: bool) -> None:
    """Say whether stdout holds JSON: an error is then printed there as well."""
    _Mode.json = chosen


def json_printed() -> bool:
    """Whether stdout holds a JSON value already."""
    return _Mode.json_printed


def is_terminal() -> bool:
    """Whether stdout is a terminal that can redraw a table."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(message: str) -> None:
    """One notice, on stderr."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def say_resumed(run_id: str, head: str | None = None) -> None:
    """What became of a run that was lost, or, where its head is a cluster, of its launcher."""
    if head is not None:
        return say(
            f"{run_id} had no launcher here: it has one again, which replaces lost hosts; its head is {head}"
        )
    return say(
        f"{run_id} was lost: its agent was killed, and its ranks with it. It is taken up again, with its budgets; "
        "its ranks start again, from its last checkpoint where it saves some"
    )


def say_warnings(checked: Checked) -> None:
    """What a job file may not mean."""
    for problem in checked.problems:
        say(f"{problem.severity}: {problem.placed(checked.source)}")


def print_line(text: str) -> None:
    """One line of the result, on stdout."""
    sys.stdout.write(text + "\n")


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON value, on stdout. NaN and the infinities, which JSON does not have, become null."""
    _Mode.json_printed = True
    sys.stdout.write(json.dumps(_finite(value), indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_bytes(chunks: Iterable[bytes]) -> None:
    """Exact bytes, on stdout."""
    sys.stdout.flush()
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


class Terminated(KeyboardInterrupt):
    """SIGTERM: everything is cleaned up as on Ctrl-C, but nobody is there to be asked."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated`, where whoever started this process has not had it ignored."""

    def raise_it(*_: object) -> None:
        raise Terminated

    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plain(text: str) -> str:
    """The text without terminal control sequences."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def seconds(value: float | None) -> str:
    """A duration for people: ``12 ms``, ``3.4 s``, ``5m 07s``, ``2h 03m``."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes = int(value // 60)
    return f"{minutes}m {value % 60:02.0f}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; ``-`` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def money(value: float | None) -> str:
    """Dollars for people; ``-`` where the amount is not known."""
    return "-" if value is None else f"{value:.2f} $"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two blanks apart, as lines."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def report(error: BaseException, *, message: str | None = None) -> None:
    """An error: its message and hint on stderr; with ``--json`` also as an object on stdout."""
    if _Mode.debug:
        import traceback

        traceback.print_exception(error)
    hint = getattr(error, "hint", None)
    # What the system said is a sentence; its number is for programs.
    text = _NUMBERS.sub("", message if message is not None else str(error))
    say(f"error: {text}")
    if hint:
        say(f"hint: {hint}")
    if _Mode.json:
        print_json({"error": {"kind": type(error).__name__, "message": text, "hint": hint}})


def _leave_quietly() -> NoReturn:
    """The reader of stdout is gone: keep Python from complaining about it when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    raise typer.Exit(_BROKEN_PIPE)


class Commands(typer.core.TyperGroup):
    """The command group: turns what a command raises into messages and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options that stand before the command."""
        check_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            check_plainly(command.get_params(ctx))  # also its `--help`, which it keeps
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background job
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_quietly()
        except KeyboardInterrupt as pressed:
            is_term = isinstance(pressed, Terminated)
            say("ended by SIGTERM" if is_term else "interrupted")
            # Where Ctrl-C met an `exec` (dataclasses are made by one), Python has noted to end itself by the signal
            # whatever is caught; the next `exec` clears that note.
            exec("")  # noqa: S102
            raise typer.Exit(TERMINATED if is_term else INTERRUPTED) from None
        except SkyMonarchError as error:
            report(error)
            raise typer.Exit(error.exit_code) from None
        except (
            OSError,
            ValueError,
            RuntimeError,
            LookupError,
            TypeError,
            ArithmeticError,
            AttributeError,
        ) as error:
            if type(error).__module__.split(".")[0] in ("typer", "click"):
                raise  # click's own Exit and Abort are RuntimeErrors
            known = isinstance(error, OSError)
            report(error, message=None if known else f"internal error: {type(error).__name__}: {error}")
            if not known:
                say("hint: `sky-monarch --debug …` shows where; please report it")
            raise typer.Exit(1) from None
        else:
            return result
