"""SkyPilot's hook for pre-emption: what a task registers under ``config: {hooks: [...]}``.

SkyPilot 0.14 runs it on Kubernetes, where a pod's SIGTERM reaches the first process only, and gives the pod the
``timeout`` of its hooks as grace period (600 s at most). On clouds the agent asks the metadata service itself
(``notices`` of ``agent.json``).
"""

from __future__ import annotations

from typing import Any

__all__ = ["preemption_hook"]

# The hook itself has to start, and to end.
_SPARE_S = 5


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
