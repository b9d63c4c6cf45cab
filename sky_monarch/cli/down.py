"""``sky-monarch down``."""

from __future__ import annotations

from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names
from sky_monarch.errors import ConfigError, SkyMonarchError

__all__ = ["down"]


def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names or ids of runs.", autocompletion=run_names),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="All live runs.")] = False,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="From TERM to KILL.")
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="The final statuses as a JSON list.")] = False,
) -> None:
    """End runs, in order. A run that has ended already is no error."""
    _output.use_json(json)
    from sky_monarch import sdk

    chosen = list(dict.fromkeys(names or ()))
    if bool(chosen) == all_:
        raise ConfigError("name the runs to end, or give --all", hint="`sky-monarch status` lists them")
    if all_:
        chosen = [one.run_id for one in sdk.runs()]
        if not chosen:
            _output.say("no live runs")
    ended, failed = [], None
    for name in chosen:
        try:
            with sdk.attach(name) as run:
                gone = run.over  # never by asking a controller, which may be what hangs
                final = run.down(grace_s=grace)
        except SkyMonarchError as error:
            if len(chosen) == 1:
                raise
            failed = failed or error
            _output.say(f"error: {name}: {error}")
            continue
        ended.append(final)
        if not json:
            state = f"already gone ({final.state})" if gone else f"ended ({final.state})"
            _output.print_line(f"{run.run_id}: {state}")
    if json:
        _output.print_json([final.to_json() for final in ended])
    if failed is not None:
        raise typer.Exit(failed.exit_code)
