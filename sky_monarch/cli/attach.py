"""``sky-monarch attach``."""

from __future__ import annotations

from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import unended_names

__all__ = ["attach"]


def attach(
    name: Annotated[
        str, typer.Argument(help="Name or id of a run.", autocompletion=unended_names, show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Events and the final status as NDJSON.")] = False,
    logs: Annotated[bool, typer.Option("--logs/--no-logs", help="Show what the ranks print.")] = True,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Begin with the last lines of each rank.")] = 10,
) -> None:
    """Watch a run that is up, until it ends. Ctrl-C leaves it running, unless you say otherwise.

    A run that was lost (its agent and the agent's keeper were killed) is taken up again first.
    """
    _output.use_json(json)
    from sky_monarch import sdk
    from sky_monarch.cli._follow import choose_view, follow

    with sdk.attach(name) as run:
        if run.resume():
            _output.say_resumed(run.run_id, run.folder.head)
        status = follow(run, choose_view(json=json), logs=logs and not json, tail=tail, owner=False)
    raise typer.Exit(status.exit_code if status.exit_code is not None else 1)
