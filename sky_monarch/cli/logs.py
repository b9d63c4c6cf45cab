"""``sky-monarch logs``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names

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

    With --replica and --rank: the exact bytes, without a prefix. Otherwise lines begin with [replica/rank].
    """
    from sky_monarch import sdk

    with sdk.attach(name) as run:
        one = setup or (replica is not None and rank is not None)
        if one and not follow and tail is None:
            return _output.write_bytes(
                run.log_bytes(replica=replica, rank=rank, generation=generation, setup=setup)
            )
        lines = run.logs(
            replica=replica, rank=rank, generation=generation, setup=setup, tail=tail, follow=follow
        )
        for found in lines:
            text = found.line if one else f"{found.prefix} {found.line}"
            sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")
            if follow:
                sys.stdout.buffer.flush()
    return None
