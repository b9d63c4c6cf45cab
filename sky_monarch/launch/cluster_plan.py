"""Plans a job on hosts that do not exist yet: candidates in order, or the reason why there is none.

Pure: nothing is asked, started or written, and no credentials are needed. What could only fail after money was
spent is refused here: groups that could not reach each other, a CUDA image on ROCm, spot where there is none.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sky_monarch.config.checkpoint_target import client_of, folder_of
from sky_monarch.config.sync import EVERY_STEP
from sky_monarch.errors import ConfigError
from sky_monarch.gpus import GPUS
from sky_monarch.launch import rocm
from sky_monarch.launch.catalog import unknown_place
from sky_monarch.launch.offers import Cloud, Offer, Reachability, Snapshot, known_offers
from sky_monarch.launch.placement import HostSet, Shape, head_name, host_name, host_sets
from sky_monarch.launch.sizing import CandidateRefusedError, choose_size
from sky_monarch.launch.tasks import head_task, host_task

if TYPE_CHECKING:
    from sky_monarch.config import Candidate, JobSpec

__all__ = ["Choice", "ClusterPlan", "Head", "Refusal", "names_one_zone", "network_of", "plan_clusters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where lighthouse and controller of a choice run.

    Attributes:
        kind: ``here``, ``cluster`` or ``api-server``.
        cluster: The cluster that holds them; None where that is none.
        own: It is a cluster of their own.
    """

    kind: str
    cluster: str | None = None
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One candidate: the whole job in one place. Candidates are tried in order, and never mixed.

    Attributes:
        infra: The place.
        accelerator: GPUs of one host, ``MI300X:8``; None for none.
        use_spot: Whether capacity may be taken back.
        instance: The place's name for a host; None where it has none, or none is known.
        image: Container image; None for the host's own system.
        hosts: The clusters.
        reachability: How they reach each other; ``one host`` where there is one.
        head: Where lighthouse and controller run.
        usd_per_hour: Price of all hosts of the job, the spare ones too, and of a head that is a cluster of its own
            where that is known; None where that of a host is unknown.
        head_usd_per_hour: Of that, the head's; None where it has no cluster of its own, or its price is unknown.
        price_day: The day of that price; ``<= `` before it where its source bears no date.
        price_source: Where it was read.
        notes: What else to know.
        tasks: ``(cluster, SkyPilot task as JSON text)``, the head's first.
        gpus_per_group: GPUs of one replica group.
    """

    infra: str
    accelerator: str | None
    use_spot: bool
    instance: str | None
    image: str | None
    hosts: tuple[HostSet, ...]
    reachability: str
    head: Head
    usd_per_hour: float | None
    price_day: str | None
    price_source: str | None
    notes: tuple[str, ...]
    tasks: tuple[tuple[str, str], ...]
    gpus_per_group: int = 0
    head_usd_per_hour: float | None = None

    def documents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """``(cluster, task)``: what ``sky launch -c cluster`` takes. Without any value of ``envs`` or ``secrets``."""
        for cluster, text in self.tasks:
            yield cluster, json.loads(text)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self)
        values["tasks"] = [{"cluster": cluster, "task": task} for cluster, task in self.documents()]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A candidate that cannot be, and what would help."""

    infra: str
    wanted: str
    reason: str
    fix: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.wanted} on {self.infra}: {self.reason}; {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What would be launched.

    Attributes:
        name: Name of the job.
        digest: Hash of what would be launched: equal for equal intent. Prices are no part of it.
        replicas: Replica groups.
        min_replicas: Groups that must be left.
        ranks_per_replica: Processes of one group.
        placement: ``same-zone`` or ``any``.
        sync: ``every_step`` or ``diloco(n)``.
        offers_read: The day of the snapshot of offers.
        choices: Candidates in the order in which they are tried, at least one.
        refused: Candidates that cannot be.
    """

    name: str
    digest: str
    replicas: int
    min_replicas: int
    ranks_per_replica: int
    placement: str
    sync: str
    offers_read: str
    choices: tuple[Choice, ...]
    refused: tuple[Refusal, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for ``plan --json``."""
        values = {key: getattr(self, key) for key in self.__dataclass_fields__}
        values["choices"] = [choice.to_json() for choice in self.choices]
        values["refused"] = [asdict(refusal) for refusal in self.refused]
        return values


def plan_clusters(job: JobSpec, *, snapshot: Snapshot | None = None) -> ClusterPlan:
    """Plan a job.

    Args:
        job: The job.
        snapshot: What is known of the places; by default what this version ships.

    Raises:
        ConfigError: No candidate can be; every reason is in it, with its fix.
    """
    known = snapshot or known_offers()
    choices: list[Choice] = []
    refused: list[Refusal] = []
    for candidate in job.resources.candidates():
        infra = candidate.infra or job.infra
        try:
            choices.append(_choice(job, candidate, infra, known))
        except CandidateRefusedError as error:
            spot = " spot" if candidate.use_spot else ""
            wanted = f"{candidate.accelerator or 'no GPU'}{spot}"
            refused.append(Refusal(infra=infra, wanted=wanted, reason=str(error), fix=error.fix))
    if not choices:
        _refuse_all(refused)
    choices = list(dict.fromkeys(choices))
    if not job.resources.prefers_order:
        choices.sort(key=_cheapest_first)
    return ClusterPlan(
        name=job.name,
        digest=_digest(job, choices),
        replicas=job.replicas,
        min_replicas=job.min_replicas,
        ranks_per_replica=job.ranks_per_replica,
        placement=job.placement,
        sync=job.sync,
        offers_read=known.read,
        choices=tuple(choices),
        refused=tuple(refused),
    )


def _refuse_all(refused: list[Refusal]) -> None:
    if len(refused) == 1:
        (only,) = refused
        raise ConfigError(f"{only.wanted} on {only.infra}: {only.reason}", hint=only.fix)
    lines = "\n".join(f"  {refusal}" for refusal in refused)
    raise ConfigError(f"none of the {len(refused)} candidates can be\n{lines}")


def _cheapest_first(choice: Choice) -> tuple[Any, ...]:
    """Known prices first; of equal ones the spot; then by text, so that equal intent gives one order."""
    price = choice.usd_per_hour
    return (
        price is None,
        price or 0.0,
        not choice.use_spot,
        choice.infra,
        choice.accelerator or "",
        choice.tasks,
    )


def _digest(job: JobSpec, choices: list[Choice]) -> str:
    public = job.public_dict()
    kept = {key: public[key] for key in public if key not in ("infra", "resources", "head")}
    described = [json.dumps([choice.infra, asdict(choice.head), choice.tasks]) for choice in choices]
    ordered = job.resources.prefers_order
    content = {
        "job": {**kept, "envs": job.private_values()["envs"]},
        "choices": described if ordered else sorted(described),
        "ordered": ordered and len(choices) > 1,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _choice(job: JobSpec, candidate: Candidate, infra: str, known: Snapshot) -> Choice:
    cloud = _cloud(infra, candidate, known)
    image = _image(job, candidate, cloud)
    if cloud.by == "local":
        return _here(job)
    shape, offer = choose_size(job, candidate, cloud, known)
    spare = job.recovery.spare
    hosts = host_sets(job.name, replicas=job.replicas, shape=shape, spare=spare)
    head = _head(job, cloud, hosts)
    accelerator = f"{candidate.accelerator.name}:{shape.gpus}" if candidate.accelerator else None
    each = offer.price(spot=candidate.use_spot) if offer else None
    head_price = cloud.head.usd_per_hour if head.own and cloud.head else None
    total = None if each is None else round(each * (shape.hosts + spare) + (head_price or 0.0), 4)
    tasks = [
        (host.cluster, host_task(job, candidate, cloud, _filled(host, hosts), infra, accelerator, image))
        for host in hosts
    ]
    if head.own and head.cluster:
        tasks.insert(0, (head.cluster, head_task(cloud, head.cluster, infra)))
    return Choice(
        infra=infra,
        accelerator=accelerator,
        use_spot=candidate.use_spot,
        instance=offer.instance if offer else None,
        image=image,
        hosts=hosts,
        reachability=_reach(cloud, shape, spare),
        head=head,
        usd_per_hour=total,
        price_day=offer.source.as_of if offer and total is not None else None,
        price_source=offer.source.where if offer and total is not None else None,
        notes=tuple(_notes(job, candidate, cloud, shape, offer, image, head)),
        tasks=tuple((cluster, json.dumps(task)) for cluster, task in tasks),
        gpus_per_group=candidate.accelerator.count if candidate.accelerator else 0,
        head_usd_per_hour=head_price,
    )


def _filled(host: HostSet, hosts: tuple[HostSet, ...]) -> HostSet:
    """A host with as many groups as its task is to have room for.

    Any host may take the groups of any other where one is kept spare: each is as large as the fullest then.
    """
    spared = any(not one.groups for one in hosts)
    return replace(host, groups=hosts[0].groups) if spared else host


def _reach(cloud: Cloud, shape: Shape, spare: int) -> str:
    return str(cloud.reachability) if shape.hosts + spare > 1 else "one host"


def _here(job: JobSpec) -> Choice:
    groups = tuple(range(job.replicas))
    return Choice(
        infra="local",
        accelerator=None,
        use_spot=False,
        instance=None,
        image=None,
        hosts=(HostSet(cluster="local", groups=groups),),
        reachability="one host",
        head=Head(kind="here"),
        usd_per_hour=0.0,
        price_day=None,
        price_source=None,
        notes=tuple(_unlimited(job, "this machine costs nothing")),
        tasks=(),
    )


def _cloud(infra: str, candidate: Candidate, known: Snapshot) -> Cloud:
    name = infra.partition("/")[0]
    cloud = known.clouds.get(name)
    if cloud is None:
        places = [cloud.name for cloud in known.clouds.values() if cloud.plannable]
        near = difflib.get_close_matches(name, places, 1, 0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        raise CandidateRefusedError("nothing is known of this place", f"{meant}known are {', '.join(places)}")
    if not cloud.plannable:
        raise CandidateRefusedError(
            f"SkyPilot has no cloud of this name; {cloud.title} is reached by {cloud.by}",
            "write the infra of its cluster, such as k8s/CONTEXT, slurm/CLUSTER or ssh/POOL",
        )
    if (unknown := unknown_place(infra, cloud)) is not None:
        raise CandidateRefusedError(*unknown)
    if candidate.use_spot and cloud.spot is False:
        raise CandidateRefusedError(f"{cloud.title} has no spot capacity", "leave use_spot out")
    return cloud


def _image(job: JobSpec, candidate: Candidate, cloud: Cloud) -> str | None:
    """The image of the hosts; nothing of CUDA where there are AMD GPUs."""
    given, accelerator = candidate.image, candidate.accelerator
    if given and cloud.name == "local":
        raise CandidateRefusedError("this machine runs no image", "leave resources.image out")
    if given and not cloud.docker and cloud.name != "slurm":
        raise CandidateRefusedError(
            f"SkyPilot starts no container image on {cloud.title}",
            "leave resources.image out: the hosts' own ROCm is used, which setup may install",
        )
    if accelerator is None:
        return given
    gpu = GPUS[accelerator.name]
    if given and rocm.image_is_cuda(given):
        raise CandidateRefusedError(
            f"{given} is built for CUDA, {gpu.name} needs ROCm",
            f"leave image out, or write {rocm.DEFAULT_IMAGE}",
        )
    if given and (needed := rocm.too_old_for(gpu, given)):
        raise CandidateRefusedError(
            f"the ROCm of {given} does not know {gpu.arch}: {gpu.name} needs {needed} or newer",
            f"leave image out, or write {rocm.DEFAULT_IMAGE}",
        )
    for field in ("setup", "run"):
        if part := rocm.cuda_in(getattr(job, field)):
            raise CandidateRefusedError(
                f"{field} installs a build for CUDA ({part}), {gpu.name} needs ROCm",
                "install from https://download.pytorch.org/whl/rocm…, or leave torch to the image",
            )
    return given or (rocm.DEFAULT_IMAGE if cloud.docker else None)


def _head(job: JobSpec, cloud: Cloud, hosts: tuple[HostSet, ...]) -> Head:
    kind = job.head
    if kind == "auto":
        apart = len(hosts) > 1 and cloud.reachability is not Reachability.SAME_NETWORK
        kind = "here" if cloud.name == "slurm" or apart else "cluster"
    if kind != "cluster":
        return Head(kind=kind)
    if len(hosts) == 1 and cloud.reachability is not Reachability.SAME_NETWORK:
        return Head(kind=kind, cluster=hosts[0].cluster)
    return Head(kind=kind, cluster=head_name(job.name), own=True)


def _notes(
    job: JobSpec,
    candidate: Candidate,
    cloud: Cloud,
    shape: Shape,
    offer: Offer | None,
    image: str | None,
    head: Head,
) -> Iterator[str]:
    gpu = GPUS[candidate.accelerator.name] if candidate.accelerator else None
    infra = candidate.infra or job.infra
    if spare := job.recovery.spare:
        count = "host is a spare one" if spare == 1 else "hosts are spare ones"
        yield f"{spare} {count}, at the price of any other: $/H has it in the sum"
    if job.placement == "same-zone" and not names_one_zone(infra):
        yield from _zone_notes(job, cloud, shape, head, infra)
    if shape.sets > 1 and job.sync != EVERY_STEP and cloud.reachability is not Reachability.SAME_NETWORK:
        yield from _tunnel_notes(job, shape)
    if shape.nodes > 1:
        yield f"each group takes {shape.nodes} hosts: the loss of one ends it on all of them until that one is replaced"
    if shape.unused:
        yield f"{shape.unused} of {shape.hosts * shape.gpus} GPUs are used by no group"
    if gpu and image is None:
        yield f"the hosts bring ROCm{f' {gpu.rocm} or newer' if gpu.rocm else ''} themselves"
    if candidate.use_spot and cloud.spot is None:
        yield f"whether there is spot capacity depends on the {cloud.title} cluster"
    if candidate.use_spot and offer and offer.usd_spot_per_hour == offer.usd_per_hour is not None:
        yield f"no price for spot was read for {cloud.title}: $/H is that of on-demand capacity, and spot may cost less"
    if image and cloud.name == "slurm":
        yield "the image needs Pyxis on the Slurm cluster"
    if gpu and cloud.name in ("k8s", "ssh"):
        yield f"each node needs the label {gpu.node_label}: {gpu.label_command()}"
    if gpu and gpu.dies > 1 and cloud.name in ("k8s", "slurm", "ssh"):
        yield f"a {gpu.name} shows as {gpu.dies} devices, and devices are what {cloud.title} counts"
    if offer and offer.in_catalog is not True:
        known = "has no row for it" if offer.in_catalog is False else "was not read"
        yield f"SkyPilot's own catalog {known}: `sky launch` may not find it"
    if job.checkpoint is not None and folder_of(job.checkpoint.to) is not None:
        yield f"checkpoint.to, {job.checkpoint.to}, must be a folder that all hosts share, or it is lost with its host"
    if job.checkpoint is not None and (client := client_of(job.checkpoint.to)) and client not in job.setup:
        yield f"checkpoint.to needs {client} on each host: pip install it in setup, or bring it in the image"
    if offer is None or offer.price(spot=candidate.use_spot) is None:
        yield from _unlimited(
            job, f"no price of hosts on {cloud.title} is known, unless SkyPilot names one at launch"
        )
    if head.own and offer and offer.price(spot=candidate.use_spot) is not None:
        if cloud.head is None:
            yield f"the price of {head.cluster} (2 CPUs) is not known, and not in the sum"
        else:
            yield f"$/H has {cloud.head.usd_per_hour:g} for {head.cluster} ({cloud.head.instance}) in the sum"
    if head.own and cloud.name == "slurm":
        yield f"{head.cluster} is a job of Slurm: a time limit or a pre-emption of its partition ends the whole run"
    if head.kind == "here" and cloud.name != "slurm":
        yield "the hosts dial this machine: it needs an address that they reach"


def _unlimited(job: JobSpec, why: str) -> Iterator[str]:
    """Where money is nothing that could end the run, though the job says how much may be spent."""
    usd, hours = (
        isinstance(limit, float) for limit in (job.budget.max_usd, job.budget.max_hours)
    )  # else: off
    if usd:
        besides = "budget.max_hours does" if hours else "write budget.max_hours, which does"
        yield f"{why}: budget.max_usd does not limit the run; {besides}"


def _zone_notes(job: JobSpec, cloud: Cloud, shape: Shape, head: Head, infra: str) -> Iterator[str]:
    """Who chooses the place, where the job leaves that open."""
    is_open = head.own and "/" not in infra.strip("/")
    is_zone = is_open and names_one_zone(f"{infra}/region")  # a region of that cloud has no zones
    if shape.hosts > 1 and not is_zone:
        there = f" in the region of {head.cluster}" if is_open else ""
        yield f"{host_name(job.name, 0)} chooses the zone{there}, the others follow it"
    if is_open and not cloud.pool:
        yield (
            f"{head.cluster} is launched first, in a region that SkyPilot chooses for a machine without GPU; all hosts "
            f"go to that region, and where it has none left {head.cluster} waits and bills: write infra: "
            f"{cloud.name}/REGION with one that sells them to you"
        )


def _tunnel_notes(job: JobSpec, shape: Shape) -> Iterator[str]:
    """How much goes through the head depends on the model, which a plan does not know: what it depends on is said."""
    first, last = f"{job.name}-h0", f"{job.name}-h{shape.hosts - 1}"
    factor = 2 * (job.replicas - 1) / job.replicas
    yield (
        f"{first} to {last} reach nobody but the head: groups average, and heal, through the agents' tunnel there "
        "(by gloo, GPUs too)"
    )
    yield (
        f"with {job.sync} each group sends and gets {factor:.2g} times the bytes of its trained parameters once in so "
        f"many steps, all of it through the head; one that heals gets parameters and outer optimizer once"
    )
    yield "clouds charge for what leaves them, by the gigabyte: that is in no price here"


def names_one_zone(infra: str) -> bool:
    """Whether infra says where exactly, so that hosts need not follow the first of them."""
    cloud, *parts = [part for part in infra.split("/") if part]
    return len(parts) >= (1 if cloud in ("slurm", "k8s", "ssh", "do") else 2)


def network_of(infra: str) -> str:
    """The part of a place in which all hosts reach each other, where that cloud's do: its region, or the whole cluster.

    >>> network_of("oci/us-sanjose-1/AD-1"), network_of("slurm/alps/gpu"), network_of("k8s/arn:aws:eks:x/y")
    ('oci/us-sanjose-1', 'slurm/alps', 'k8s/arn:aws:eks:x/y')
    """
    cloud, *parts = [part for part in infra.split("/") if part]
    if cloud in ("k8s", "kubernetes", "ssh"):  # names of contexts may hold a slash
        return infra
    return "/".join([cloud, *parts[:1]])
