"""A host's task for one attempt: what it has not in common with any other. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sky_monarch.launch.notices import filled_in, notices_on
from sky_monarch.provision.provider import HostOrder

__all__ = ["address", "armed", "variables"]


def address(task: Mapping[str, Any], order: HostOrder) -> dict[str, Any]:
    """The task with what the agent of this attempt is told, and who tells it that its host is taken away.

    What is secret stands in ``secrets`` alone, which SkyPilot redacts where it shows a task.
    """
    run_id = order.agent.get("run_id", "")
    infra = str((task.get("resources") or {}).get("infra") or "")
    told = json.dumps({"notices": notices_on(infra), **order.agent}, separators=(",", ":"))
    folder = f"{run_id}/{order.host}-a{order.attempt}"
    envs = {**task.get("envs", {}), "SKY_MONARCH_FOLDER": folder, "SKY_MONARCH_HOST": told}
    whole = {
        **task,
        "envs": envs,
        "secrets": {**task.get("secrets", {}), "SKY_MONARCH_ENROLMENT": order.enrolment},
    }
    if hooks := (task.get("config") or {}).get("hooks"):
        ship_id = str(envs.get("SKY_MONARCH_SHIP", ""))
        hooks = [filled_in(hook, ship_id=ship_id, folder=folder) for hook in hooks]
        whole["config"] = {**task["config"], "hooks": hooks}
    return whole


def armed(task: Mapping[str, Any], *, infra: str | None, autodown_minutes: int | None) -> dict[str, Any]:
    """The task as it is launched: it ends its cluster itself, and goes where the first host is.

    Args:
        task: What :func:`address` returned.
        infra: Where exactly; None: as the task says.
        autodown_minutes: A cluster on which nothing runs for so long ends itself, where its cloud can. None: as
            the task says.
    """
    resources = dict(task.get("resources") or {})
    if infra is not None:
        resources["infra"] = infra
    if autodown_minutes is not None and resources.get("autostop"):
        resources["autostop"] = {"idle_minutes": autodown_minutes, "down": True}
    return {**task, "resources": resources}


def variables(order: HostOrder, mark: str) -> dict[str, str]:
    """What SkyPilot sets on a node, for a host that is a process of this machine.

    Args:
        order: Which host.
        mark: ``SKYPILOT_TASK_ID=…``, which tells its processes apart.
    """
    name, _, value = mark.partition("=")
    return {
        name: value,
        "SKYPILOT_CLUSTER_INFO": json.dumps({"cluster_name": order.host, "cloud": "local"}),
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
    }
