"""What this version of sky-monarch can launch, of all that a job file may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from sky_monarch.config.spec import JobSpec

__all__ = ["LAUNCHABLE", "require_supported"]

LAUNCHABLE = ("local",)
"""Values of ``infra`` that ``up`` accepts."""


def require_supported(job: JobSpec) -> None:
    """Refuse a valid job that this version cannot launch.

    Raises:
        ConfigError: Naming what is not supported yet, and what to write instead.
    """
    elsewhere = [place for place in job.places() if place not in LAUNCHABLE]
    if elsewhere:
        raise ConfigError(
            f"infra: this version launches on {', '.join(LAUNCHABLE)} only, not on {', '.join(map(repr, elsewhere))}",
            hint="`sky-monarch plan` shows what would run there; write `infra: local` to run on this machine",
        )
    if any(candidate.use_spot for candidate in job.resources.candidates()):
        raise ConfigError(
            "resources.use_spot: this machine is no spot capacity",
            hint="leave use_spot out with `infra: local`",
        )
