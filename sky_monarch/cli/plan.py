"""``sky-monarch plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sky_monarch.cli import _output

__all__ = ["plan"]


def plan(
    job: Annotated[Path, typer.Argument(help="Job file (YAML).", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the run; by default the job's.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K[=V]", help="As with `up`. No value of it is shown."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="K[=V]", help="As with `up`. No value of it is shown."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON.")] = False,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Only the SkyPilot tasks, one YAML document each.")
    ] = False,
    candidate: Annotated[
        int, typer.Option("--candidate", "-c", min=1, help="The candidate whose tasks are shown.")
    ] = 1,
    sky: Annotated[
        bool, typer.Option("--sky", help="Also look it up in the catalogs of the installed SkyPilot.")
    ] = False,
) -> None:
    """Show where JOB would run, what that costs, and the tasks that SkyPilot would get; start nothing.

    Needs neither network nor credentials, nor SkyPilot. Prices are those of a dated snapshot. What `up` leaves out or
    would refuse is said on stderr; the exit code is then 2 for what it would refuse.
    """
    _output.use_json(json)
    from sky_monarch.cli._plan import say_notes, show_plan, workdir_warnings
    from sky_monarch.config import JobFileError, check_job, parse_overrides
    from sky_monarch.errors import ConfigError
    from sky_monarch.sdk import _needs, _up

    checked = check_job(
        job, env_overrides=parse_overrides(env or ()), secret_overrides=parse_overrides(secret or ())
    )
    if checked.job is None:
        raise JobFileError(checked.source, checked.problems)
    _output.say_warnings(checked)
    found = _up.review_job(checked.job, name=name)
    refusals = list(found.refusals)
    workdir = None
    if any(choice.tasks for choice in found.plan.choices) and (json or not yaml):
        try:
            workdir = _up.workdir_of(checked.job, name=name)
        except ConfigError as error:
            refusals.append(error)
    show_plan(found, json=json, yaml=yaml, candidate=candidate, sky=sky, workdir=workdir)
    for warning in [] if workdir is None or yaml else workdir_warnings(workdir):
        _output.say(f"warning: {warning}")
    say_notes(found.left_out, refusals, lacking=_needs.lacking(checked.job))
    if refusals:
        raise typer.Exit(ConfigError.exit_code)
