"""``sky-monarch validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.errors import ConfigError

__all__ = ["validate"]


def validate(
    job: Annotated[Path, typer.Argument(help="Job file (YAML).", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="All problems as a JSON list; empty where there are none.")] = False,
) -> None:
    """Check JOB and name everything that is wrong with it; start nothing."""
    _output.use_json(False)  # what is wrong is the result here
    from sky_monarch.config import check_job, problems_as_json

    spec, problems = check_job(job)
    failed = spec is None
    if json:
        _output.print_json(problems_as_json(problems))
    elif spec is not None:
        for problem in problems:
            _output.say(f"warning: {problem}")
        _output.print_line(f"{job}: {spec.name} is a valid job")
    else:
        for problem in problems:
            _output.say(f"{problem.severity}: {problem}")
    if failed:
        raise typer.Exit(ConfigError.exit_code)
