"""``sky-monarch agent | controller | lighthouse``: the processes that a launch starts. Hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["agent", "controller", "lighthouse"]

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="Its JSON configuration.")]


def _run(name: str, config: Path) -> None:
    import importlib

    module = importlib.import_module(f"sky_monarch.{name}")
    raise typer.Exit(module.main([str(config)]))


def agent(config: _Config) -> None:
    """Run a host's agent."""
    _run("agent", config)


def controller(config: _Config) -> None:
    """Run a run's controller."""
    _run("controller", config)


def lighthouse(config: _Config) -> None:
    """Run a run's lighthouse."""
    _run("lighthouse", config)
