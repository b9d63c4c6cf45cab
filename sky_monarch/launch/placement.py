"""Replica groups on hosts: arithmetic only."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = [
    "HostSet",
    "Shape",
    "attempt_of",
    "cluster_name",
    "groups_per_host",
    "head_name",
    "host_name",
    "host_sets",
    "shape_of",
]

_LONGEST = 33
"""What Azure and Kubernetes leave of a name, 42, beside the user's hash that SkyPilot adds: of what is longer it cuts
the end off, which is all that tells two attempts apart, and puts two digits of a hash in its place."""

_STEM = _LONGEST - len("-head")
"""What of that a job's name may take: the rest tells its head and its first thousand hosts apart."""


def _stem(job: str) -> str:
    """What the names of all clusters of a job begin with: its own, or of a longer one what fits and a hash of all."""
    if len(job) <= _STEM:
        return job
    tail = f"-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
    return job[: _STEM - len(tail)].rstrip("-") + tail


def host_name(job: str, number: int) -> str:
    """Name of a host of a job, which is that of its first cluster, too.

    >>> host_name("demo", 0), host_name("llama-3-70b-pretraining-on-mi300x", 0)
    ('demo-h0', 'llama-3-70b-pretrai-6ddf7427-h0')
    """
    return f"{_stem(job)}-h{number}"


def head_name(job: str) -> str:
    """Name of the cluster that lighthouse and controller of a job run on."""
    return f"{_stem(job)}-head"


def cluster_name(host: str, attempt: int) -> str:
    """Name of the cluster of one attempt at a host: two of them may stand for a while, and never share a name.

    >>> cluster_name("demo-h0", 1), cluster_name("demo-h0", 2)
    ('demo-h0', 'demo-h0-a2')
    """
    name = f"{host}-a{attempt}"
    if attempt <= 1:
        return host
    if len(name) <= _LONGEST:
        return name
    tail = f"-{hashlib.sha256(host.encode()).hexdigest()[:8]}-a{attempt}"
    return host[: _LONGEST - len(tail)].rstrip("-") + tail


def attempt_of(cluster: str, host: str) -> int | None:
    """Which attempt at a host a cluster of this name is; None where it is none.

    >>> attempt_of("demo-h0-a2", "demo-h0"), attempt_of("demo-h0", "demo-h0"), attempt_of("demo-h01", "demo-h0")
    (2, 1, None)
    """
    if cluster == host:
        return 1
    found = re.search(r"-a([1-9][0-9]{0,9})\Z", cluster, re.ASCII)
    attempt = int(found[1]) if found else 0
    return attempt if attempt > 1 and cluster == cluster_name(host, attempt) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSet:
    """One cluster of one host: what is launched, lost and replaced alone.

    Attributes:
        cluster: Its name, ``<job>-h<k>`` as a rule, see :func:`host_name`.
        groups: Replica groups on it; none on a spare one.
        node: Which part of its group it has, where that needs several hosts; counted from 0.
        nodes: Hosts that each of its groups needs.
    """

    cluster: str
    groups: tuple[int, ...]
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How groups and hosts of one size go together.

    Attributes:
        gpus: GPUs of one host, of which the job uses all but ``unused``; 0 for a host without.
        groups: Groups that share one host.
        nodes: Hosts of one group; where it needs several, it shares none of them.
        sets: Groups that do not share their hosts, or hosts that groups share.
        unused: GPUs that no group uses, of all hosts.
    """

    gpus: int
    groups: int
    nodes: int
    sets: int
    unused: int

    @property
    def hosts(self) -> int:
        """Hosts of all groups."""
        return self.sets * self.nodes


def groups_per_host(accelerator: str | None, gpus: int) -> int:
    """Groups of ``gpus`` each that one host has GPUs for; 1 where that is no matter of GPUs.

    >>> groups_per_host("MI300X:8", 2), groups_per_host("MI300X:8", 16), groups_per_host(None, 0)
    (4, 1, 1)
    """
    count = (accelerator or "").rpartition(":")[2]
    return max(1, int(count) // gpus) if gpus and count.isdecimal() else 1


def shape_of(*, replicas: int, gpus: int, per_host: int) -> Shape | None:
    """How ``replicas`` groups of ``gpus`` each lie on hosts of ``per_host``.

    Args:
        replicas: Groups, at least 1.
        gpus: GPUs of one group; 0 for none, which takes a host for each group.
        per_host: GPUs of one host.

    Returns:
        None where a group would need a part of a host.
    """
    if gpus == 0:
        return Shape(gpus=0, groups=1, nodes=1, sets=replicas, unused=0)
    if gpus <= per_host:
        groups = min(per_host // gpus, replicas)
        sets = -(-replicas // groups)
        return Shape(
            gpus=per_host, groups=groups, nodes=1, sets=sets, unused=sets * per_host - replicas * gpus
        )
    if gpus % per_host:
        return None
    return Shape(gpus=per_host, groups=1, nodes=gpus // per_host, sets=replicas, unused=0)


def host_sets(job: str, *, replicas: int, shape: Shape, spare: int = 0) -> tuple[HostSet, ...]:
    """The clusters of a job: each group on exactly one, in order, the fuller ones first, or on several of its own.

    The spare ones come last.

    Groups are spread evenly, so that the loss of one host takes as few along as the number of hosts allows.
    """
    each, more = divmod(replicas, shape.sets)
    found, first = [], 0
    for index in range(shape.sets):
        size = each + (index < more)
        groups = tuple(range(first, first + size))
        for node in range(shape.nodes):
            name = host_name(job, index * shape.nodes + node)
            found.append(HostSet(cluster=name, groups=groups, node=node, nodes=shape.nodes))
        first += size
    found += [
        HostSet(cluster=host_name(job, shape.hosts + index), groups=(), nodes=shape.nodes)
        for index in range(spare)
    ]
    return tuple(found)
