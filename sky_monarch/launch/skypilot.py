"""The only importer of SkyPilot, which costs seconds of processor time: nothing else may need it.

Two things are asked of it. What the catalogs of the installed SkyPilot say about a task: that needs no credentials
and no network, as long as the catalogs are on this machine. And requests to its API server, which answers each with
an id at once: they live in the server, so whoever knows the id can wait for one, also after a restart of ours.

An API server is never started on the way (the SDK would): it would belong to the run that happened to need it, and
end with it. :func:`ensure_server` is for a command that a person typed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sky_monarch.errors import LaunchError

__all__ = ["Verdict", "installed", "look_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What SkyPilot knows for a task.

    Attributes:
        found: ``(instance, dollars an hour of all its nodes)`` of each match, in SkyPilot's own order.
        reason: Why there is none.
    """

    found: tuple[tuple[str, float], ...]
    reason: str | None = None


def installed() -> bool:
    """Whether SkyPilot can be imported. Does not import it."""
    return importlib.util.find_spec("sky") is not None


def look_up(task: Mapping[str, Any]) -> Verdict:
    """Ask the catalogs of the installed SkyPilot for one task.

    Raises:
        LaunchError: SkyPilot is not installed, or does not take this task.
    """
    try:
        import sky
        from sky import exceptions
    except ImportError as error:
        raise LaunchError("SkyPilot is not installed", hint="pip install 'sky-monarch[sky]'") from error
    try:
        read = sky.Task.from_yaml_config(dict(task))
    except (ValueError, exceptions.InvalidSkyPilotConfigError) as error:
        raise LaunchError(f"SkyPilot does not take the task {task.get('name')}: {error}") from error
    found: list[tuple[str, float]] = []
    reasons: list[str] = []
    for resources in read.resources:
        if resources.cloud is None:
            reasons.append("the task names no cloud")
            continue
        try:
            feasible = resources.cloud.get_feasible_launchable_resources(resources, num_nodes=read.num_nodes)
        except (OSError, ValueError, exceptions.NotSupportedError) as error:  # a catalog that is not there
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found += [
            (str(match.instance_type), round(match.get_cost(3600) * read.num_nodes, 4))
            for match in feasible.resources_list
        ]
        if not feasible.resources_list:
            reasons.append(feasible.hint or "its catalog has no host like that")
    return Verdict(found=tuple(found), reason=None if found else "; ".join(reasons))
