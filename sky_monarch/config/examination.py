"""How a job has its hosts looked at before their first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Need", "examination", "needs_of"]

_LIMIT_S = 10.0
_DEVICES_LIMIT_S = 60.0
"""Where devices are tried, which takes a host with eight of them up to 30 s: it gets half of this for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The accelerators that a host has to have for its replica groups.

    Attributes:
        devices: How many, all groups together.
        kinds: Models of which any will do.
        groups: Replica groups that share them.
    """

    devices: int
    kinds: tuple[str, ...]
    groups: int


def needs_of(job: Mapping[str, Any], hosts: Mapping[str, Sequence[int]]) -> dict[str, Need]:
    """What each host of a run needs; nobody anything where the job asks for no accelerators.

    Args:
        job: The public JobSpec as JSON values.
        hosts: Replica groups by host; one that several list is shared out evenly among them. One without groups, a
            spare, needs what the fullest does.
    """
    resources = job.get("resources") or {}
    if not _accelerated(resources):
        return {}
    from sky_monarch.config.resources import Resources  # pydantic

    wanted = [one.accelerator for one in Resources.model_validate(resources).candidates()]
    first = wanted[0]
    if first is None:  # devices are counted, and masked, by the first candidate alone
        return {}
    kinds = tuple(sorted({one.name for one in wanted if one is not None}))
    parts = Counter(replica for mine in hosts.values() for replica in mine)
    needs = {
        host: Need(devices=sum(first.count // parts[one] for one in mine), kinds=kinds, groups=len(mine))
        for host, mine in hosts.items()
        if mine
    }
    fullest = max(needs.values(), key=lambda need: need.devices, default=None)
    return needs if fullest is None else {host: needs.get(host, fullest) for host in hosts}


def examination(
    job: Mapping[str, Any], *, place: str, held: bool, need: Need | None = None
) -> dict[str, Any] | None:
    """``doctor`` of ``agent.json``, without the interpreter that comes first in its command.

    Args:
        job: The public JobSpec as JSON values; one without the field is of another version, and nothing is done.
        place: Which host it is, in which attempt.
        held: Whether its groups wait for it in any case: a host that takes minutes to come can be had anew.
        need: The accelerators without which it is unfit.

    Returns:
        None where the job wants none.
    """
    if job.get("doctor", "off") == "off":
        return None
    accelerated = _accelerated(job.get("resources") or {})
    devices = ["--devices"] if accelerated else []
    if need is not None:
        devices += [f"--need={need.devices}", f"--kinds={','.join(need.kinds)}", f"--groups={need.groups}"]
    return {
        "argv": ["-m", "sky_monarch.doctor.smoke", f"--host={place}", *devices],
        "limit_s": _DEVICES_LIMIT_S if accelerated else _LIMIT_S,
        "holds": held or accelerated,
        "strict": accelerated,
    }


def _accelerated(resources: Mapping[str, Any]) -> bool:
    options = (*(resources.get("any_of") or ()), *(resources.get("ordered") or ()))
    return any(option.get("accelerators") for option in (resources, *options))
