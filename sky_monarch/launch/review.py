"""What `up` would make of a job: what it launches, what it leaves out, and all that it would refuse.

The one list of these: `plan` and a dry run show it, `up` raises the first of it. Pure, as the plan is: what this
machine lacks for a launch is said elsewhere (``sdk._needs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.cluster_plan import ClusterPlan, plan_clusters
from sky_monarch.launch.offers import Snapshot
from sky_monarch.launch.remote import Launchable, launchable

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["Review", "require_even", "review"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A plan, and what `up` says to it.

    Attributes:
        plan: Hosts, groups and prices.
        chosen: What of it `up` launches; None where that is nothing, and for a run of this machine alone.
        refusals: Why `up` refuses the job; empty where it does not.
    """

    plan: ClusterPlan
    chosen: Launchable | None
    refusals: tuple[ConfigError, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Candidates of the plan that `up` does not launch, and why."""
        return self.chosen.left_out if self.chosen else ()

    def require(self) -> None:
        """Refuse what `up` refuses.

        Raises:
            ConfigError: The first reason.
        """
        for refusal in self.refusals:
            raise refusal

    def to_json(self) -> dict[str, Any]:
        """What `up` says, as JSON values."""
        return {
            "refusals": [{"message": str(one), "hint": one.hint} for one in self.refusals],
            "left_out": list(self.left_out),
        }


def review(job: JobSpec, *, snapshot: Snapshot | None = None) -> Review:
    """Plan a job, and see what `up` says to that.

    Args:
        job: The job.
        snapshot: What is known of the places; by default what this version ships.

    Raises:
        ConfigError: There is no plan: no candidate can be.
    """
    plan = plan_clusters(job, snapshot=snapshot)
    refusals: list[ConfigError] = []
    try:
        require_even(job)
    except ConfigError as error:
        refusals.append(error)
    if job.places() == ("local",):
        return Review(plan=plan, chosen=None, refusals=(*_refused_here(job), *refusals))
    chosen = None
    try:
        chosen = launchable(job, plan)
    except ConfigError as error:
        refusals.append(error)
    if job.lighthouse.kind == "torchft":
        refusals.append(
            ConfigError(
                "lighthouse: TorchFT's knows no authentication, so it serves this machine only",
                hint="leave lighthouse out, or write `infra: local`",
            )
        )
    return Review(plan=plan, chosen=chosen, refusals=tuple(refusals))


def require_even(job: JobSpec) -> None:
    """Refuse a job whose ranks cannot share the accelerators of their group: its controller could not go on.

    Raises:
        ConfigError: They cannot.
    """
    accelerator = job.resources.candidates()[0].accelerator
    if accelerator is not None and accelerator.count % job.ranks_per_replica:
        raise ConfigError(
            f"resources.accelerators: {accelerator} cannot be shared out evenly among the {job.ranks_per_replica} "
            "ranks of a group",
            hint=f"one process a device: ranks_per_replica: {accelerator.count}",
        )


def _refused_here(job: JobSpec) -> Iterator[ConfigError]:
    """What a run of this machine alone cannot have."""
    if job.recovery.spare:
        yield ConfigError(
            "recovery.spare: a run of this machine alone has no hosts that could be lost",
            hint="leave it out, or rehearse hosts here: up --hosts N",
        )
    if job.head in ("cluster", "api-server"):
        yield ConfigError(
            f"head: {job.head}: a run of this machine alone has its head here",
            hint="leave head out; --hosts N rehearses hosts, and a head that is a cluster",
        )
