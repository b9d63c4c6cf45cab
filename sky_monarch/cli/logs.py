"""``sky-monarch logs``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names
from sky_monarch.cli._events import size_text
from sky_monarch.errors import ConfigError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.sdk import LogLine, Run

__all__ = ["logs"]

_PATIENCE_S = 2.0


def logs(
    name: Annotated[
        str, typer.Argument(help="Name or id of a run.", autocompletion=run_names, show_default=False)
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    replica: Annotated[
        int | None, typer.Option("--replica", min=0, help="Of one replica group only.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Of one rank only.")] = None,
    generation: Annotated[int | None, typer.Option("--generation", min=1, help="Of one generation.")] = None,
    setup: Annotated[bool, typer.Option("--setup", help="The output of `setup` instead.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="The last lines of each rank only.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As NDJSON, one line of output a line.")] = False,
) -> None:
    """Show what the ranks of a run have printed, also of hosts that are gone.

    With --replica and --rank: the exact bytes, without a prefix. Otherwise lines begin with [replica/rank]. Where
    there is nothing, or not all of it, it says so on stderr.
    """
    from sky_monarch import sdk

    _output.use_json(json)
    with sdk.attach(name) as run:
        one = len(run.hosts) < 2 if setup else replica is not None and rank is not None
        if one and not follow and tail is None and not json:
            chunks = run.log_bytes(replica=replica, rank=rank, generation=generation, setup=setup)
            is_empty = _write(chunks)
        else:
            lines = run.logs(
                replica=replica, rank=rank, generation=generation, setup=setup, tail=tail, follow=follow
            )
            texts = (_text(found, one=one, json=json) for found in lines)
            is_empty = _write((text.encode("utf-8", "replace") + b"\n" for text in texts), flush=follow)
        if is_empty and tail != 0:
            _say_why(run, replica=replica, generation=generation, setup=setup)
        elif not is_empty and not follow:
            _say_what_is_gone(run)


def _text(found: LogLine, *, one: bool, json: bool) -> str:
    if json:
        return dumps(found.to_json(), ensure_ascii=False)
    return found.line if one else f"{found.prefix} {found.line}"


def _say_what_is_gone(run: Run) -> None:
    """Say how much of the run's output is not there any more, where the exact bytes cannot."""
    with contextlib.suppress(SkyMonarchError):
        output = run.status(patience_s=_PATIENCE_S).output
        if output is not None and output.dropped_bytes:
            _output.say(
                f"of this run {size_text(output.dropped_bytes)} of output are not kept any more "
                "(`logs.archive_mib` and `logs.segments` of the job are the limits)"
            )


def _write(chunks: Iterable[bytes], *, flush: bool = False) -> bool:
    """Write to stdout; whether there was nothing to write."""
    is_empty = True
    sys.stdout.flush()
    for chunk in chunks:
        is_empty = False
        sys.stdout.buffer.write(chunk)
        if flush:
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()
    return is_empty


def _say_why(run: Run, *, replica: int | None, generation: int | None, setup: bool) -> None:
    """Say why there is no output.

    Raises:
        ConfigError: There never was such a generation.
    """
    if setup and not str(run.folder.job.get("setup") or "").strip():
        return _output.say("the job has no `setup`")
    if generation is not None:
        newest = dict(_generations(run, replica))
        if not any(generation <= one for one in newest.values()):
            listed = ", ".join(f"replica {one} is at {number}" for one, number in newest.items())
            raise ConfigError(
                f"there is no generation {generation}", hint=listed or "no replica group has begun yet"
            )
    if run.over and run.folder.provider is not None:
        return _output.say(
            "nothing of what was printed has reached the head, or its head was lost with it; `sky-monarch events` has "
            "the last lines of ranks that failed"
        )
    return _output.say("`setup` has printed nothing" if setup else "nothing was printed")


def _generations(run: Run, replica: int | None) -> Iterator[tuple[int, int]]:
    for group in run.status().groups:
        if replica in (None, group.replica) and group.generation:
            yield group.replica, group.generation
