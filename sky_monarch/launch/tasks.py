"""SkyPilot's tasks for the hosts of a job, as plain values: what ``sky launch`` reads as YAML.

Nothing of the user's environment is in them: the values of ``envs`` and ``secrets`` reach the ranks through the
agent, over its own channel, and so does the run's token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sky_monarch.launch import rocm
from sky_monarch.launch.bootstrap import HEAD_RUN, HEAD_SETUP, RUN, SETUP
from sky_monarch.launch.notices import FOLDER, SHIP, hooks_on
from sky_monarch.launch.offers import Cloud, Reachability
from sky_monarch.launch.placement import HostSet

if TYPE_CHECKING:
    from sky_monarch.config import Candidate, JobSpec

__all__ = ["ADDED", "HEAD_PORT", "IDLE_MINUTES", "head_task", "host_task"]

ADDED = (
    "file_mounts (this sky-monarch)",
    "workdir (a copy of it)",
    "the zone of the first host",
    *(f"envs {name}" for name in ("SKY_MONARCH_SHIP", "SKY_MONARCH_FOLDER", "SKY_MONARCH_HOST")),
    "secrets SKY_MONARCH_ENROLMENT",
)
"""What the task of a host gets when it is launched, and nothing else; ``$SKY_MONARCH_…`` in its hooks is filled in."""

HEAD_PORT = 7443
"""Where a head that is a cluster of its own is dialled."""

IDLE_MINUTES = 10
"""A cluster on which nothing runs for so long is forgotten: it ends itself."""


def _times(amount: str, groups: float) -> str:
    """``16+`` for each of four groups is ``64+`` for their host, and half of it for each of two hosts of a group."""
    plus = "+" if amount.endswith("+") else ""
    return f"{float(amount.removesuffix('+')) * groups:.10g}{plus}"


def _resources(cloud: Cloud, infra: str) -> dict[str, Any]:
    found: dict[str, Any] = {"infra": infra}
    if cloud.autodown:
        found["autostop"] = {"idle_minutes": IDLE_MINUTES, "down": True}
    return found


def host_task(
    job: JobSpec,
    candidate: Candidate,
    cloud: Cloud,
    host: HostSet,
    infra: str,
    accelerator: str | None,
    image: str | None,
) -> dict[str, Any]:
    """The task of one host: it runs the agent, which does all the rest.

    Args:
        job: The job.
        candidate: What a group asks for.
        cloud: Where.
        host: Its cluster.
        infra: The place, as SkyPilot spells it.
        accelerator: GPUs of one host, ``MI300X:8``.
        image: Container image.
    """
    resources = _resources(cloud, infra)
    if accelerator:
        resources["accelerators"] = accelerator
    if candidate.cpus:
        resources["cpus"] = _times(candidate.cpus, len(host.groups) / host.nodes)
    if candidate.memory_gib:
        resources["memory"] = _times(candidate.memory_gib, len(host.groups) / host.nodes)
    if candidate.use_spot:
        resources["use_spot"] = True
    if image:
        resources["image_id"] = image
    if cloud.network_tier:
        resources["network_tier"] = "best"
    task: dict[str, Any] = {
        "name": host.cluster,
        "num_nodes": 1,
        "resources": resources,
        "workdir": str(job.resolved_workdir()),
    }
    if accelerator:
        own = job.private_values()
        chosen = {*own["envs"], *own["secrets"]}
        task["envs"] = {name: value for name, value in rocm.environment().items() if name not in chosen}
    task["setup"], task["run"] = SETUP, RUN
    if hooks := hooks_on(infra, ship_id=SHIP, folder=FOLDER):
        task["config"] = {"hooks": hooks}
    return task


def head_task(cloud: Cloud, cluster: str, infra: str) -> dict[str, Any]:
    """The task of a head that is a cluster of its own: no GPU, never spot."""
    resources = {**_resources(cloud, infra), "cpus": "2+", "memory": "8+"}
    if cloud.ports and cloud.reachability is not Reachability.SAME_NETWORK:
        resources["ports"] = [HEAD_PORT]
    return {
        "name": cluster,
        "num_nodes": 1,
        "resources": resources,
        "setup": HEAD_SETUP,
        "run": HEAD_RUN,
    }
