"""What a launch needs of this machine. A plan needs nothing of it, and names what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sky_monarch.errors import ConfigError
from sky_monarch.launch import local, skypilot
from sky_monarch.launch.environment import caller_value
from sky_monarch.launch.wheel import GIVEN, require_core_to_ship

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["lacking", "require_all"]


def lacking(job: JobSpec) -> Iterator[ConfigError]:
    """Each thing that the launch of a job would not find here, and how to get it."""
    from sky_monarch.config.checkpoint_target import require_client

    checks: list[Callable[[], object]]
    if job.places() != ("local",):
        checks = [_require_skypilot]
        if not caller_value(GIVEN):
            checks.append(lambda: require_core_to_ship(Path(__file__).parents[1]))
    else:
        checks = [local.require_core]
        if job.checkpoint is not None:
            to = job.checkpoint.to
            checks.append(lambda: require_client(to))  # its ranks are processes of this machine
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield error


def require_all(job: JobSpec) -> None:
    """Refuse a launch that would fail here.

    Raises:
        ConfigError: The first thing that is missing.
    """
    for missing in lacking(job):
        raise missing


def _require_skypilot() -> None:
    if not skypilot.installed():
        raise ConfigError(
            "hosts are launched by SkyPilot, which is not installed", hint="pip install 'sky-monarch[sky]'"
        )
