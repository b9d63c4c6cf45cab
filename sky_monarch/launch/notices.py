"""How a host learns that it is about to be taken away: from its cloud, or from SkyPilot's hook for pre-emption.

SkyPilot 0.14 runs its hooks on Kubernetes, where a pod's SIGTERM reaches the first process only, and gives the pod
their ``timeout`` as grace period (600 s at most). On clouds the agent asks the metadata service itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FOLDER", "SHIP", "filled_in", "hooks_on", "notices_on", "preemption_hook"]

SHIP, FOLDER = "$SKY_MONARCH_SHIP", "$SKY_MONARCH_FOLDER"
"""Stand in the hooks of a plan for what only a run knows."""

# Those that `rust_core/src/agent/notice.rs` knows.
_CLOUDS = frozenset({"aws", "azure", "gcp", "oci", "runpod"})

# Where SkyPilot runs a host as a pod: a pool of hosts by SSH is a small Kubernetes, too.
_PODS = frozenset({"k8s", "kubernetes", "ssh"})
# The hook itself has to start, and to end.
_SPARE_S = 5


def notices_on(infra: str) -> dict[str, str]:
    """``notices`` of the ``agent.json`` of a host.

    Args:
        infra: The place, such as ``azure`` or ``oci/region/zone``.
    """
    place = _place(infra)
    return {"kind": place if place in _CLOUDS else "off"}


def hooks_on(infra: str, *, ship_id: str, folder: str) -> list[dict[str, Any]]:
    """``config.hooks`` of the task of a host; none where SkyPilot runs none.

    Args:
        infra: The place.
        ship_id: What was shipped, as ``host.sh`` has it.
        folder: The agent's, below ``~/.sky-monarch/runs``.
    """
    if _place(infra) not in _PODS:
        return []
    home = "$HOME/.sky-monarch"
    return [preemption_hook(python=f"{home}/{ship_id}/bin/python", directory=f"{home}/runs/{folder}")]


def filled_in(hook: Mapping[str, Any], *, ship_id: str, folder: str) -> dict[str, Any]:
    """A hook of a plan as that of one attempt: SkyPilot runs it outside of the task, whose variables it has not."""
    return {**hook, "run": str(hook["run"]).replace(SHIP, ship_id).replace(FOLDER, folder)}


def _place(infra: str) -> str:
    return infra.partition("/")[0].lower()


def preemption_hook(*, python: str, directory: str, grace_s: int = 40) -> dict[str, Any]:
    """One entry of ``config.hooks`` of a task: it tells the agent of this host, and waits until that has left.

    Args:
        python: Interpreter on the host that has sky-monarch; may hold shell variables.
        directory: Folder on the host with the agent's ``agent.json``; likewise.
        grace_s: Until the host is taken away.
    """
    reason = "SkyPilot's hook: ${SKYPILOT_HOOK_EVENT:-preemption}"
    words = f'"{python}" -m sky_monarch.agent --notice "{directory}" --grace {grace_s} --reason "{reason}"'
    return {"run": f"{words}\n", "events": ["preemption"], "timeout": grace_s + _SPARE_S}
