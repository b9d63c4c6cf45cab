"""``sky-monarch status``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names
from sky_monarch.cli._output import columns, money, number, plain, print_json, print_line, say, seconds

if TYPE_CHECKING:
    from sky_monarch.sdk import RunStatus

__all__ = ["status"]


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name or id of a run; without it, all live runs.", autocompletion=run_names),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON: a list, or one object with NAME.")] = False,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Ended runs as well.")] = False,
) -> None:
    """Show what runs are doing."""
    _output.use_json(json)
    from sky_monarch import sdk

    if name is not None:
        one, trouble = sdk.glance(name)
        if json:
            print_json(one.to_json())
        else:
            _details(one)
        if trouble is not None:  # what is shown is of its files alone: that is to be seen by scripts, too
            say(f"error: {trouble}")
            if trouble.hint:
                say(f"hint: {trouble.hint}")
            raise typer.Exit(1)
        return None
    found = sdk.runs(ended=all_)
    if json:
        return print_json([one.to_json() for one in found])
    if found:
        for text in _table(found):
            print_line(text)
    else:
        say("no runs" if all_ else "no live runs; `sky-monarch status --all` shows those that have ended")
    return None


def _table(found: Sequence[RunStatus]) -> list[str]:
    header = ["NAME", "STATE", "STEP", "GROUPS", "RESTARTS", "LASTED", "RUN"]
    rows = [list(_row(one)) for one in found]
    if any(one.hosts for one in found):  # what costs money is seen at once
        header[-1:-1] = ["HOSTS", "COST"]
        for one, row in zip(found, rows, strict=True):
            row[-1:-1] = _spent(one)
    return columns(header, rows)


def _spent(one: RunStatus) -> tuple[str, str]:
    if not one.hosts:
        return "-", "-"
    hosts = [host for host in one.hosts if not host.head]
    return f"{sum(host.phase == 'UP' for host in hosts)}/{len(hosts)}", money(one.cost_usd)


def _row(one: RunStatus) -> tuple[str, ...]:
    able = sum(group.state in ("RUNNING", "DONE") for group in one.groups)
    age_s = one.elapsed_s
    if age_s is None and one.created_ms:  # 0: its folder does not say
        age_s = max(0.0, time.time() - one.created_ms / 1000)
    goal = "" if one.target_step is None else f"/{one.target_step}"
    groups = "-" if one.replicas is None else f"{able}/{one.replicas}"
    restarts = str(sum(group.restarts for group in one.groups)) if one.groups else "-"
    return one.name, one.state, f"{number(one.step)}{goal}", groups, restarts, seconds(age_s), one.run_id


def _findings(one: RunStatus) -> list[str]:
    """Errors that the doctor found, whole; of warnings only how many: they are for a quiet moment."""
    lines = []
    for finding in one.findings:
        if finding.severity == "error":
            fix = f" (fix: {finding.fix})" if finding.fix else ""
            lines.append(plain(f"host {finding.host}: {finding.check}: {finding.message}{fix}"))
    warnings = sum(finding.severity == "warning" for finding in one.findings)
    if warnings:
        lines.append(f"{warnings} warning(s) of the doctor: `sky-monarch status {one.name} --json` has them")
    return lines


def _details(one: RunStatus) -> None:
    from sky_monarch.cli._report import host_lines, recovery_lines, rehearsal_lines, result_line

    print_line(result_line(one))
    if one.quorum is not None:
        print_line(f"quorum {number(one.quorum.quorum_id)}")
    if one.setup is not None and one.setup.state:
        code = "" if one.setup.exit_code is None else f", exit code {one.setup.exit_code}"
        print_line(f"setup {one.setup.state}{code}")
    for text in [*host_lines(one), *_findings(one)]:
        print_line(text)
    if one.groups:
        header = (
            "GROUP",
            "GENERATION",
            "STATE",
            "STEP",
            "LOSS",
            "QUORUM",
            "STEPS/S",
            "RESTARTS",
            "PIDS",
            "REASON",
        )
        rows = [
            (
                str(group.replica),
                str(group.generation),
                group.state,
                number(group.step),
                number(group.loss),
                number(group.quorum_id),
                number(group.rate, 2),
                str(group.restarts),
                ",".join(str(rank.pid) for rank in group.ranks if rank.pid is not None) or "-",
                group.reason or "",
            )
            for group in one.groups
        ]
        for text in columns(header, rows):
            print_line(text)
    for group in one.groups:
        if group.slower is not None:
            print_line(
                f"replica {group.replica} is slow: its steps take {group.slower:g} times those of the others"
            )
        for rank in group.ranks:
            if rank.exit is not None and rank.pid is None:
                print_line(f"replica {group.replica} rank {rank.rank}: {rank.exit}")
    for text in [*recovery_lines(one), *rehearsal_lines(one)]:
        print_line(text)
    print_line(f"files: {one.run_dir}")
