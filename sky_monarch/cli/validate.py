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
    json: Annotated[
        bool, typer.Option("--json", help="All problems as a JSON list; empty where there are none.")
    ] = False,
) -> None:
    """Check JOB and name everything that is wrong with it; start nothing."""
    _output.use_json(False)  # what is wrong is the result here
    from sky_monarch.config import check_job, problems_as_json

    checked = check_job(job)
    if json:
        _output.print_json(problems_as_json(checked.problems))
    else:
        for problem in checked.problems:
            _output.say(f"{problem.severity}: {problem.placed(checked.source)}")
        if checked.job is not None:
            _output.print_line(f"{job}: {checked.job.name} is a valid job")
    if checked.job is None:
        raise typer.Exit(ConfigError.exit_code)
