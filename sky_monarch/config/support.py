"""What this version of sky-monarch can launch, of all that a job file may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from sky_monarch.config.spec import JobSpec

__all__ = ["require_supported"]


def require_supported(job: JobSpec) -> None:
    """Refuse a valid job that this version cannot launch, wherever its hosts are.

    What depends on the place is refused with the plan (``launch.remote``), which knows the places.

    Raises:
        ConfigError: Naming what is not supported, and what to write instead.
    """
    if job.places() == ("local",):
        if any(candidate.use_spot for candidate in job.resources.candidates()):
            raise ConfigError(
                "resources.use_spot: this machine is no spot capacity",
                hint="leave use_spot out with `infra: local`",
            )
        return
    if job.lighthouse.kind == "torchft":
        raise ConfigError(
            "lighthouse: TorchFT's knows no authentication, so it serves this machine only",
            hint="leave lighthouse out, or write `infra: local`",
        )
