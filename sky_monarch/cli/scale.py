"""``sky-monarch scale``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import unended_names

if TYPE_CHECKING:
    from sky_monarch.sdk.scaling import Scaled

__all__ = ["scale"]


def scale(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name or id of a live run.", autocompletion=unended_names)
    ],
    replicas: Annotated[
        int, typer.Argument(metavar="REPLICAS", help="Replica groups that it is to have, 1 or more.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change; change nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The changes as JSON.")] = False,
) -> None:
    """Have more or fewer replica groups in a run that goes on.

    New groups get their state from those that train. Those with the highest numbers leave: they finish their step
    first, and nothing is lost. Hosts are asked for, and taken down once they are empty. Returns at once; `status`
    shows how far it is.
    """
    _output.use_json(json)
    from sky_monarch import sdk
    from sky_monarch.sdk.scaling import scale_body

    scale_body(replicas, dry_run=dry_run, reason="")  # refuses what no run could have
    with sdk.attach(name) as run:
        scaled = run.scale(replicas, dry_run=dry_run)
    if json:
        _output.print_json({"run_id": run.run_id, "name": run.name, **scaled.to_json()})
        return
    for line in lines_of(run.name, scaled):
        _output.print_line(line)


def lines_of(name: str, scaled: Scaled) -> list[str]:
    """What changes, for people."""
    if scaled.previous == scaled.replicas:
        return [f"{name}: has {scaled.replicas} replica groups already"]
    would = " (dry run: nothing is changed)" if scaled.dry_run else ""
    lines = [f"{name}: {scaled.previous} -> {scaled.replicas} replica groups{would}"]
    told: tuple[tuple[str, Sequence[object]], ...] = (
        ("start", [f"replica {one}" for one in scaled.start]),
        ("leave after their step", [f"replica {one}" for one in scaled.stop]),
        ("hosts asked for", scaled.launch),
        ("hosts taken down once empty", scaled.end),
        ("note", scaled.notes),
    )
    return lines + [f"  {what}: {', '.join(map(str, which))}" for what, which in told if which]
