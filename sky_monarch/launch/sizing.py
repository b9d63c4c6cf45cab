"""Which size of host a job takes in one place, and why it can take none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sky_monarch.config.sync import EVERY_STEP
from sky_monarch.gpus import MOST_PER_HOST
from sky_monarch.launch.offers import Cloud, Offer, Reachability, Snapshot
from sky_monarch.launch.placement import Shape, shape_of

if TYPE_CHECKING:
    from sky_monarch.config import Candidate, JobSpec

__all__ = ["CandidateRefusedError", "choose_size"]

_WHY_SAME_NETWORK = "replica groups exchange gradients at each step, over any port"


class CandidateRefusedError(Exception):
    """This candidate cannot be.

    Attributes:
        fix: What would help.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def choose_size(
    job: JobSpec, candidate: Candidate, cloud: Cloud, known: Snapshot
) -> tuple[Shape, Offer | None]:
    """The size of host that serves best: what costs least, if anything can be.

    Args:
        job: The job.
        candidate: What a group asks for.
        cloud: Where.
        known: Where else it could be had.

    Returns:
        How groups lie on hosts, and the offer; None for an offer where the place has no sizes of its own.

    Raises:
        CandidateRefusedError: No size can be; the reason is that of the largest.
    """
    gpus = candidate.accelerator.count if candidate.accelerator else 0
    fitting: list[tuple[tuple[Any, ...], Shape, Offer | None]] = []
    problems: list[tuple[str, str]] = []
    for per_host, offer in sorted(_sizes(job, candidate, cloud, known), key=lambda size: -size[0]):
        shape = shape_of(replicas=job.replicas, gpus=gpus, per_host=per_host)
        problem = _problem(job, cloud, shape, gpus, per_host)
        if problem is not None:
            problems.append(problem)
        elif shape is not None:
            each = offer.price(spot=candidate.use_spot) if offer else None
            total = shape.hosts * (each if each is not None else per_host)
            apart = cloud.reachability is not Reachability.SAME_NETWORK
            # Of equally dear ones: the fewest idle GPUs, then many hosts, of which one lost takes few groups along;
            # but few where hosts do not share a network.
            fitting.append(
                (
                    (each is None, round(total, 4), shape.unused, shape.sets if apart else -shape.sets),
                    shape,
                    offer,
                )
            )
    if not fitting:
        reason, fix = problems[0]
        raise CandidateRefusedError(reason, fix)
    _, shape, offer = min(fitting, key=lambda entry: entry[0])
    return shape, offer


def _sizes(
    job: JobSpec, candidate: Candidate, cloud: Cloud, known: Snapshot
) -> Iterator[tuple[int, Offer | None]]:
    """``(GPUs of a host, offer)`` of every size that could be."""
    accelerator, wanted = candidate.accelerator, job.resources.gpus_per_host
    if accelerator is None:
        yield 0, None
        return
    if cloud.pool:
        yield wanted or min(accelerator.count, MOST_PER_HOST), None
        return
    offers = [offer for offer in cloud.offers if offer.gpu == accelerator.name]
    if not offers:
        sellers = known.sellers(accelerator.name)
        elsewhere = f"{', '.join(sellers)} has it" if sellers else "no cloud that SkyPilot knows has it"
        raise CandidateRefusedError(
            f"no {accelerator.name} is known there (offers of {known.read})",
            f"{elsewhere}; other hosts are reached by k8s, slurm and ssh",
        )
    if candidate.use_spot:
        offers = [offer for offer in offers if offer.spot is not False]
        if not offers:
            raise CandidateRefusedError(f"{accelerator.name} is not sold as spot there", "leave use_spot out")
    if wanted is not None:
        there = sorted({offer.count for offer in offers if offer.count})
        offers = [offer for offer in offers if offer.count == wanted]
        if not offers:
            sizes = " or ".join(map(str, there))
            raise CandidateRefusedError(
                f"no host there has {wanted} {accelerator.name}", f"set resources.gpus_per_host to {sizes}"
            )
    for offer in offers:
        if offer.count is not None:
            yield offer.count, offer


def _problem(
    job: JobSpec, cloud: Cloud, shape: Shape | None, gpus: int, per_host: int
) -> tuple[str, str] | None:
    """``(reason, fix)`` where groups cannot lie on hosts of this size, or could not talk."""
    if shape is None:
        return (
            f"a group of {gpus} GPUs would take a part of a host of {per_host}",
            f"ask for a multiple of {per_host} GPUs a group",
        )
    if shape.nodes > 1 and cloud.reachability is not Reachability.SAME_NETWORK:
        # A cluster of several hosts would have a network of its own, but is lost and replaced as a whole.
        return (
            f"a group needs {gpus} GPUs, a host has {per_host}, each host is a cluster of its own, and {_apart(cloud)}",
            f"ask for {per_host} GPUs a group or fewer, or choose a place with a common network",
        )
    if job.ranks_per_replica % shape.nodes:
        return (
            f"a group of {job.ranks_per_replica} ranks cannot be shared by {shape.nodes} hosts",
            f"set ranks_per_replica to a multiple of {shape.nodes}",
        )
    if shape.nodes > 1 and job.recovery.spare:
        return (
            f"a group of {gpus} GPUs takes {shape.nodes} hosts of {per_host}, and a spare host takes whole groups only",
            f"leave recovery.spare out, or ask for {per_host} GPUs a group or fewer",
        )
    if shape.sets > 1 and job.sync == EVERY_STEP and cloud.reachability is not Reachability.SAME_NETWORK:
        return (
            f"{job.replicas} groups need {shape.sets} hosts of {cloud.title}, and {_apart(cloud)}: {_WHY_SAME_NETWORK}",
            f"{_sharing(job, cloud, gpus)}choose a place with a common network, or write sync: diloco(20)",
        )
    return None


def _sharing(job: JobSpec, cloud: Cloud, gpus: int) -> str:
    """How all groups would share one host, as the beginning of a fix: with as many GPUs as they ask for, or fewer."""
    if not gpus:
        return ""
    largest = max((offer.count or 0 for offer in cloud.offers), default=0) or MOST_PER_HOST
    wanted = job.replicas * gpus
    if wanted <= largest:
        return f"let all groups share one host of {wanted} GPUs (resources.gpus_per_host), "
    ways = []
    if largest // job.replicas:
        ways.append(f"{largest // job.replicas} GPUs a group")
    if largest // gpus > 1:
        ways.append(f"{largest // gpus} groups")
    if not ways:
        return ""
    return f"ask for {' or '.join(ways)}, which share one host of {largest} (now {wanted} GPUs), "


def _apart(cloud: Cloud) -> str:
    """How its hosts reach each other, where that is not enough."""
    words = {
        Reachability.UNKNOWN: "whether its hosts reach each other is not known",
        Reachability.NONE: "its hosts do not reach each other",
    }
    return words.get(cloud.reachability, f"its hosts reach each other by {cloud.reachability} only")
