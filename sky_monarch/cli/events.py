"""``sky-monarch events``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names

__all__ = ["events"]


def events(
    name: Annotated[
        str, typer.Argument(help="Name or id of a run.", autocompletion=run_names, show_default=False)
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json: Annotated[bool, typer.Option("--json", help="As NDJSON, one event a line.")] = False,
    after: Annotated[int, typer.Option("--after", min=0, help="Only events with a larger id.")] = 0,
) -> None:
    """Show what happened in a run."""
    _output.use_json(json)
    from sky_monarch import sdk
    from sky_monarch.cli._events import line

    for event in sdk.events(name, after=after, follow=follow):
        if json:
            _output.print_json(event.to_json(), indent=None)
        else:
            _output.print_line(line(event))
            if follow:
                sys.stdout.flush()
