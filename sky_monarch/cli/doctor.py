"""``sky-monarch doctor``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output

if TYPE_CHECKING:
    from sky_monarch.doctor import Examination, Wanted

__all__ = ["doctor"]


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    bench: Annotated[
        bool,
        typer.Option(
            "--bench", help="Also measure: copies of each device, what devices exchange, the host's own."
        ),
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="GPU:N", help="Accelerators that must be there, such as MI300X:8."),
    ] = None,
) -> None:
    """Look for what keeps this host from training well; say what to do about it. Changes nothing.

    Takes a minute at the most, five with --bench. Exits 0 unless something is an error; a host without accelerators
    is none.
    """
    _output.use_json(json)
    from sky_monarch.doctor import Situation, examine, exchange, limits, paths, probe
    from sky_monarch.doctor.tree import root_of

    wanted = _expected(expect)
    root = root_of("this", os.environ)
    report = probe.probe(bench=bench)
    if bench and "failed" not in report:
        report |= {"exchange": exchange.measure(report), "paths": paths.measure()}
    found = examine(
        Situation(
            root=root,
            env=os.environ,
            limits=limits.measure(root),
            report=report,
            tools=probe.tools(),
            torch_hip=probe.torch_hip(),
            wanted=wanted,
        )
    )
    if json:
        _output.print_json(found.to_json())
    else:
        _show(found)
    if not found.healthy:
        raise typer.Exit(1)


def _expected(text: str | None) -> Wanted | None:
    if text is None:
        return None
    from sky_monarch.doctor import Wanted
    from sky_monarch.errors import ConfigError
    from sky_monarch.gpus import GPUS, UnknownGpuError, parse_accelerator

    try:
        wanted = parse_accelerator(text)
    except UnknownGpuError as error:
        meant = f"did you mean --expect {error.suggestion}?" if error.suggestion else None
        raise ConfigError(
            f"--expect {text}: {error}",
            hint=error.fix or meant or "name one of them and how many: --expect MI300X:8",
        ) from error
    count = wanted.count * GPUS[wanted.name].dies
    return Wanted(devices=count, models=(wanted.name,), exactly=True)


def _show(found: Examination) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sky_monarch.doctor import Severity

    colours = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue", Severity.OK: "green"}
    terminal = _output.is_terminal()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "CHECK", "FINDING"):
        table.add_column(name, overflow="fold")
    for finding in found.findings:
        text = Text(finding.message)
        if finding.fix:
            text.append("\nfix: ", style="bold").append(finding.fix)
        table.add_row(Text(finding.severity.value, style=colours[finding.severity]), finding.check, text)
    # In a pipe: no colours, no cursor movements, and one line a finding as far as it goes.
    console = Console(
        force_terminal=terminal, no_color=not terminal, width=None if terminal else 160, highlight=False
    )
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        _output.print_line(line.rstrip())
    counts = {severity: sum(one.severity is severity for one in found.findings) for severity in Severity}
    _output.print_line(
        ("SIMULATED: " if found.simulated else "")
        + f"{counts[Severity.ERROR]} error(s), {counts[Severity.WARNING]} warning(s)"
    )
