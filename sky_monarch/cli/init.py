"""``sky-monarch init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sky_monarch.cli import _output
from sky_monarch.errors import ConfigError

__all__ = ["init"]


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write a commented job file to start from."""
    from sky_monarch.config import INIT_TEMPLATE

    target = path / "job.yaml" if path.is_dir() else path
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(INIT_TEMPLATE)
    except FileExistsError:
        raise ConfigError(f"{target} exists already", hint="--force overwrites it") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    _output.print_line(f"wrote {target}")
    _output.say(f"next: sky-monarch validate {target} && sky-monarch up {target}")
