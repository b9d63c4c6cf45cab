"""``sky-monarch up``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sky_monarch.cli import _output

__all__ = ["up"]


def up(
    job: Annotated[Path, typer.Argument(help="Job file (YAML).", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the run; by default the job's.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the run is up.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="K[=V]", help="Variable for the ranks; without =V taken from your environment."
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="K[=V]",
            help="The same for values nobody may see. Leave out =V: what you type is visible in `ps`.",
        ),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option("--inject", metavar="FAULT", help="Rehearse a fault: kill:replica=1,rank=0,step=30."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; start and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Events and the final status as NDJSON.")] = False,
    logs: Annotated[bool, typer.Option("--logs/--no-logs", help="Show what the ranks print.")] = True,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="From TERM to KILL on Ctrl-C.")
    ] = 10.0,
) -> None:
    """Launch JOB, keep it alive, and watch it until it ends.

    Ctrl-C asks whether to stop the run; without a terminal it stops it.
    """
    _output.use_json(json)
    from sky_monarch import sdk
    from sky_monarch.config import JobFileError, check_job, parse_overrides
    from sky_monarch.sdk import _up

    checked = check_job(
        job, env_overrides=parse_overrides(env or ()), secret_overrides=parse_overrides(secret or ())
    )
    if checked.job is None:
        raise JobFileError(checked.source, checked.problems)
    for problem in checked.problems:
        _output.say(f"warning: {problem}")
    if dry_run and checked.job.places() != ("local",):
        from sky_monarch.cli._plan import show_plan

        show_plan(_up.plan_anywhere(checked.job, name=name), json=json)
        return None if json else _output.say("nothing was started (--dry-run)")
    if dry_run:
        plan = _up.plan_job(checked.job, name=name, inject=inject or ())
        return _show_plan(plan.files["job.json"], plan.files["controller.json"]["injections"], json=json)
    with sdk.up(checked.job, name=name, inject=inject or ()) as run:
        if run.resumed:
            _output.say_resumed(run.run_id)
        if detach:
            if json:
                return _output.print_json(run.status().to_json(), indent=None)
            _output.print_line(f"{run.run_id} is up")
            return _output.say(
                f"watch it with `sky-monarch attach {run.name}`, end it with `sky-monarch down {run.name}`"
            )
        from sky_monarch.cli._follow import choose_view, follow

        if not json:
            _output.say(f"{run.run_id} is up; its files are in {run.folder.path}")
        status = follow(run, choose_view(json=json), logs=logs and not json, grace_s=grace)
    raise typer.Exit(status.exit_code if status.exit_code is not None else 1)


def _show_plan(job: object, injections: object, *, json: bool) -> None:
    from typing import Any, cast

    values = cast("dict[str, Any]", job)
    if json:
        return _output.print_json({"job": values, "injections": injections}, indent=None)
    groups = f"{values['replicas']} replica groups of {values['ranks_per_replica']}"
    _output.print_line(f"{values['name']} on {values['infra']}: {groups}, at least {values['min_replicas']}")
    for key in ("workdir", "setup", "run"):
        if values.get(key):
            first, *more = _output.plain(str(values[key])).strip().splitlines()
            _output.print_line(f"  {key}: {first}{' …' if more else ''}")
    for key in ("envs", "secrets"):
        if values.get(key):
            _output.print_line(f"  {key}: {', '.join(values[key])}")
    _output.print_line(f"  sync: {values['sync']}")
    _output.print_line(f"  lighthouse: {values['lighthouse']['kind']}")
    _output.print_line("nothing was started (--dry-run)")
    return None
