"""``sky-monarch up``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import head_places
from sky_monarch.errors import ConfigError, SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch.config import JobSpec
    from sky_monarch.launch.plan import LocalPlan
    from sky_monarch.launch.remote import RemotePlan
    from sky_monarch.launch.review import Review

__all__ = ["up"]


def up(
    job: Annotated[Path, typer.Argument(help="Job file (YAML).", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the run; by default the job's.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the run is up.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Launch beyond this machine without being asked.")
    ] = False,
    hosts: Annotated[
        int | None,
        typer.Option(
            "--hosts", metavar="N", min=1, help="Rehearse N hosts: each is an agent of this machine."
        ),
    ] = None,
    spare: Annotated[
        int | None,
        typer.Option(
            "--spare",
            metavar="N",
            min=0,
            help="Hosts kept ready for those that are lost; by default the job's.",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="WHERE",
            autocompletion=head_places,
            help="Where lighthouse and controller run, in place of the job's: here, or on a cluster.",
        ),
    ] = None,
    head_address: Annotated[
        str | None,
        typer.Option(
            "--head-address",
            metavar="ADDRESS",
            help="Address of this machine that hosts dial; by default that of its route to others.",
        ),
    ] = None,
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

    Beyond this machine it shows the plan, its price and what is shipped, and asks, before anything is started.
    Ctrl-C asks whether to stop the run; without a terminal it stops it, and so does SIGTERM.
    """
    _output.use_json(json)
    from sky_monarch.config import JobFileError, check_job, parse_overrides
    from sky_monarch.launch.remote import RemotePlan
    from sky_monarch.sdk import _up

    checked = check_job(
        job, env_overrides=parse_overrides(env or ()), secret_overrides=parse_overrides(secret or ())
    )
    if checked.job is None:
        raise JobFileError(checked.source, checked.problems)
    _output.say_warnings(checked)
    spec = checked.job

    def planned() -> LocalPlan | RemotePlan:
        return _up.plan_run(
            spec,
            name=name,
            inject=inject or (),
            hosts=hosts,
            head=head,
            address=head_address,
            spare=spare,
            is_dry=dry_run,
        )

    if dry_run and spec.places() != ("local",) and hosts is None:
        return _show_elsewhere(
            spec, _up.review_job(spec, name=name, spare=spare, head=head), planned, json=json
        )
    plan = planned()
    if dry_run:
        return _show_here(spec, plan, json=json)
    if isinstance(plan, RemotePlan):
        _announce(plan, yes=yes)
    with _output.sigterm_raises(), _up.launch_plan(plan, timeout_s=60.0) as run:
        if run.resumed:
            _output.say_resumed(run.run_id, run.folder.head)
        if detach:
            if json:
                return _output.print_json(run.status().to_json(), indent=None)
            _output.print_line(f"{run.run_id} is up" + (", its hosts are on their way" if run.hosts else ""))
            return _output.say(
                f"watch it with `sky-monarch attach {run.name}`, end it with `sky-monarch down {run.name}`"
            )
        from sky_monarch.cli._follow import choose_view, follow

        if not json:
            _output.say(f"{run.run_id} is up; its files are in {run.folder.path}")
        status = follow(run, choose_view(json=json), logs=logs and not json, grace_s=grace)
    raise typer.Exit(status.exit_code if status.exit_code is not None else 1)


def _announce(plan: RemotePlan, *, yes: bool) -> None:
    """Say what is about to be launched; where it costs money, go on only with a yes."""
    from sky_monarch.cli._plan import launch_lines, workdir_warnings
    from sky_monarch.launch.address import is_loopback

    for line in launch_lines(plan):
        _output.say(line)
    if plan.shipment is None:
        return
    warnings = workdir_warnings(plan.shipment.workdir)
    if plan.address is not None and is_loopback(plan.address):
        warnings.append(f"{plan.address} is reached from this machine only: its hosts have to be here")
    for warning in warnings:
        _output.say(f"warning: {warning}")
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            "a launch beyond this machine is asked for first, and nobody is here to answer", hint="give -y"
        )
    count = len(plan.hosts)  # the spare ones too
    price = plan.choices[0].usd_per_hour
    cost = "at a price that is not known" if price is None else f"for {price:.2f} $/h"
    sys.stderr.write(f"launch {count} host{'' if count == 1 else 's'} {cost}? [y/N]: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        _output.say("nothing was started")
        raise typer.Exit(_output.INTERRUPTED)


def _show_elsewhere(
    job: JobSpec, found: Review, planned: Callable[[], LocalPlan | RemotePlan], *, json: bool
) -> None:
    """A plan of hosts that do not exist, and what `up` would say to it: by the very way that `up` goes."""
    from sky_monarch.cli._plan import say_notes, show_plan, wheel_line, workdir_warnings
    from sky_monarch.sdk import _needs, _up

    refusals: list[SkyMonarchError] = list(found.refusals)
    lacking = list(_needs.lacking(job))
    if not (refusals or lacking):
        try:
            planned()
        except SkyMonarchError as error:
            refusals.append(error)
    shipment = None
    try:
        shipment = _up.shipment_of(job)
    except ConfigError as error:
        if not (refusals or lacking):
            refusals.append(error)
    show_plan(found, json=json, shipment=shipment, workdir=None if shipment is None else shipment.workdir)
    if shipment is not None and not json:
        _output.print_line("")
        _output.print_line(wheel_line(shipment))
        for warning in workdir_warnings(shipment.workdir):
            _output.say(f"warning: {warning}")
    say_notes(found.left_out, refusals, lacking=lacking)
    _leave_dry(refused=bool(refusals or lacking), json=json)


def _leave_dry(*, refused: bool, json: bool) -> None:
    """A dry run ends as `up` would: with its exit code, where that would refuse."""
    if refused:
        raise typer.Exit(ConfigError.exit_code)
    if not json:
        _output.say("nothing was started (--dry-run)")


def _show_here(job: JobSpec, plan: LocalPlan | RemotePlan, *, json: bool) -> None:
    from sky_monarch.cli._plan import say_notes
    from sky_monarch.launch.remote import RemotePlan
    from sky_monarch.sdk import _needs

    lacking = list(_needs.lacking(job))
    files = plan.head.files if isinstance(plan, RemotePlan) else plan.files
    values, injections = files["job.json"], files["controller.json"]["injections"]
    hosts = files["controller.json"].get("hosts")
    if json:
        shown = {"job": values, "injections": injections}
        _output.print_json(shown if hosts is None else {**shown, "hosts": hosts}, indent=None)
        say_notes((), (), lacking=lacking)
        return _leave_dry(refused=bool(lacking), json=True)
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
    if isinstance(plan, RemotePlan) and plan.address is None:
        _output.print_line(f"  {plan.choices[0].head.cluster}: lighthouse and controller")
    for host in hosts or ():
        groups = f"groups {', '.join(map(str, host['groups']))}" if host["groups"] else "no groups"
        _output.print_line(
            f"  {host['name']}: {'spare' if host['provisioned'] and not host['groups'] else groups}"
        )
    say_notes((), (), lacking=lacking)
    return _leave_dry(refused=bool(lacking), json=False)
