"""``sky-monarch debug-bundle``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.cli._complete import run_names

__all__ = ["debug_bundle"]


def debug_bundle(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name or id of a run; without it, the newest that is live, else the newest.",
            autocompletion=run_names,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write; it must not exist."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Path, members and what was left out, as JSON.")
    ] = False,
) -> None:
    """Write what a maintainer needs to see of a run into one file.

    Events, status, logs (the newest 32 MiB), versions, and facts of this machine. The values of secrets and
    of variables are taken out, also where a rank has printed them; look through it before you send it all the
    same.
    """
    _output.use_json(json)
    from sky_monarch import sdk

    bundle = sdk.debug_bundle(name, output)
    if json:
        return _output.print_json(bundle.to_json())
    _output.print_line(str(bundle.path))
    whose = bundle.run_id or "this machine (no run was found)"
    _output.say(f"{whose}: {len(bundle.members)} files, {bundle.size_bytes} bytes")
    for what, why in bundle.notes.items():
        _output.say(f"{what}: {why}")
    return None
