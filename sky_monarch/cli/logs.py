"""``sky-monarch logs``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from sky_monarch.sdk import Run

__all__ = ["logs"]


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
) -> None:
    """Show what the ranks of a run have printed.

    With --replica and --rank: the exact bytes, without a prefix. Otherwise lines begin with [replica/rank]. Where
    there is nothing, it says why on stderr.
    """
    from sky_monarch import sdk

    with sdk.attach(name) as run:
        one = setup or (replica is not None and rank is not None)
        if one and not follow and tail is None:
            chunks = run.log_bytes(replica=replica, rank=rank, generation=generation, setup=setup)
            is_empty = _write(chunks)
        else:
            lines = run.logs(
                replica=replica, rank=rank, generation=generation, setup=setup, tail=tail, follow=follow
            )
            texts = (found.line if one else f"{found.prefix} {found.line}" for found in lines)
            is_empty = _write((text.encode("utf-8", "replace") + b"\n" for text in texts), flush=follow)
        if is_empty and tail != 0:
            _say_why(run, replica=replica, generation=generation, setup=setup)


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
    if run.over and run.folder.provider == "skypilot":
        return _output.say(
            "what was printed was on the run's hosts, which are gone; `sky-monarch events` has the last lines of "
            "ranks that failed, and `logs -f`, while a run goes on, has all of it"
        )
    return _output.say("`setup` has printed nothing" if setup else "nothing was printed")


def _generations(run: Run, replica: int | None) -> Iterator[tuple[int, int]]:
    for group in run.status().groups:
        if replica in (None, group.replica) and group.generation:
            yield group.replica, group.generation
