"""How a job has its hosts looked at before their first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["examination"]

_LIMIT_S = 10.0
_DEVICES_LIMIT_S = 60.0
"""Where devices are tried, which takes a host with eight of them up to 30 s: it gets half of this for that."""


def examination(job: Mapping[str, Any], *, place: str, held: bool) -> dict[str, Any] | None:
    """``doctor`` of ``agent.json``, without the interpreter that comes first in its command.

    Args:
        job: The public JobSpec as JSON values; one without the field is of another version, and nothing is done.
        place: Which host it is, in which attempt.
        held: Whether its groups wait for it in any case: a host that takes minutes to come can be had anew.

    Returns:
        None where the job wants none.
    """
    if job.get("doctor", "off") == "off":
        return None
    accelerated = _accelerated(job.get("resources") or {})
    return {
        "argv": [
            "-m",
            "sky_monarch.doctor.smoke",
            f"--host={place}",
            *(["--devices"] if accelerated else []),
        ],
        "limit_s": _DEVICES_LIMIT_S if accelerated else _LIMIT_S,
        "holds": held or accelerated,
        "strict": accelerated,
    }


def _accelerated(resources: Mapping[str, Any]) -> bool:
    options = (*(resources.get("any_of") or ()), *(resources.get("ordered") or ()))
    return any(option.get("accelerators") for option in (resources, *options))
