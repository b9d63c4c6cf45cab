"""``sky-monarch down``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import unended_names
from sky_monarch.errors import ConfigError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.sdk import Run, RunStatus

__all__ = ["down"]


def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names or ids of runs.", autocompletion=unended_names),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="All live runs.")] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge", help="Forget its hosts, without waiting for them, and say what may still bill."
        ),
    ] = False,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="From TERM to KILL.")
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="The final statuses as a JSON list.")] = False,
) -> None:
    """End runs, in order, and wait until their hosts are gone. A run that has ended already is no error."""
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
                final = run.down(grace_s=grace, purge=purge, told=_tell(run) if run.hosts else None)
                left = run.may_bill()
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
        if left:
            _output.say(f"warning: may still bill: {', '.join(left)}; `sky down {' '.join(left)}` ends them")
    if json:
        _output.print_json([final.to_json() for final in ended])
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def _tell(run: Run) -> Callable[[RunStatus], None]:
    """Say which hosts are waited for, each time that changes."""
    said: list[str] = []

    def tell(status: RunStatus) -> None:
        left = [host.host for host in status.hosts if host.phase != "DOWN"]
        if left and left != said:
            said[:] = left
            _output.say(
                f"{run.name}: waiting until {', '.join(left)} {'is' if len(left) == 1 else 'are'} gone"
            )

    return tell
