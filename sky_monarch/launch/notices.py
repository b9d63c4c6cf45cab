"""How a host learns that it is about to be taken away: from its cloud, or from SkyPilot's hook for pre-emption.

SkyPilot 0.14 runs its hooks on Kubernetes, where a pod's SIGTERM reaches the first process only, and gives the pod
their ``timeout`` as grace period (600 s at most). On clouds the agent asks the metadata service itself.
"""

from __future__ import annotations

from typing import Any

__all__ = ["notices_on", "preemption_hook"]

# Those that `rust_core/src/agent/notice.rs` knows.
_CLOUDS = frozenset({"aws", "azure", "gcp", "oci", "runpod"})

# The hook itself has to start, and to end.
_SPARE_S = 5


def notices_on(infra: str) -> dict[str, str]:
    """``notices`` of the ``agent.json`` of a host.

    Args:
        infra: The place, such as ``azure`` or ``oci/region/zone``.
    """
    place = infra.partition("/")[0].lower()
    return {"kind": place if place in _CLOUDS else "off"}


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
