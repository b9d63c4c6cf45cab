"""What a run beyond this machine consists of. Pure: reads nothing, writes nothing.

Its head is a local run without groups of its own (``launch.head``), here or on a cluster that is launched for it; the
provisioner, which brings the hosts up, is always here. ``up --hosts N`` is the same with hosts that are agents of this
machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.config.sync import EVERY_STEP
from sky_monarch.errors import ConfigError
from sky_monarch.launch.address import LOOPBACK
from sky_monarch.launch.bootstrap import shipped
from sky_monarch.launch.cluster_plan import Choice, ClusterPlan, Head
from sky_monarch.launch.head import COLLECT_S, HEAD, Away, head_files
from sky_monarch.launch.placement import HostSet, Shape, groups_per_host, head_name, host_sets
from sky_monarch.launch.plan import LocalPlan
from sky_monarch.launch.shipping import Shipment
from sky_monarch.launch.tasks import IDLE_MINUTES
from sky_monarch.launch.tunnel import is_tunnelled

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["HEAD", "Launchable", "RemotePlan", "launchable", "plan_remote", "rehearsal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launchable:
    """What of a plan this version launches.

    Attributes:
        choices: In the order in which they are tried, at least one; each may place groups on hosts in its own way.
        left_out: Choices that it does not launch, and why.
    """

    choices: tuple[Choice, ...]
    left_out: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[HostSet, ...]:
        """The hosts of the choice that is tried first."""
        return self.choices[0].hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """A run beyond this machine.

    Attributes:
        head: What is written and started here.
        choices: What is launched elsewhere, in the order in which it is tried.
        left_out: Choices of the plan that this version does not launch, and why.
        provider: ``skypilot``, or ``local`` for a rehearsal.
        address: Where hosts dial the head; None where it is a cluster, which knows its own.
        shipment: What each host gets; None where hosts are of this machine.
    """

    head: LocalPlan
    choices: tuple[Choice, ...]
    left_out: tuple[str, ...]
    provider: str
    address: str | None
    shipment: Shipment | None

    @property
    def hosts(self) -> tuple[HostSet, ...]:
        """The hosts of the choice that is tried first."""
        return self.choices[0].hosts


def launchable(job: JobSpec, plan: ClusterPlan) -> Launchable:
    """What of a plan this version launches.

    Raises:
        ConfigError: Nothing; with all reasons and what would help.
    """
    kept: list[Choice] = []
    reasons: list[tuple[Choice, str, str]] = []
    for choice in plan.choices:
        reason = _reason(job, choice, kept[0] if kept else None)
        if reason is None:
            kept.append(choice)
        else:
            reasons.append((choice, *reason))
    if kept:
        left_out = tuple(f"{_named(choice)}: {why}; {fix}" for choice, why, fix in reasons)
        return Launchable(choices=tuple(kept), left_out=left_out)
    if len(reasons) == 1:
        choice, why, fix = reasons[0]
        raise ConfigError(f"{_named(choice)}: {why}", hint=fix)
    lines = "\n".join(f"  {_named(choice)}: {why}; {fix}" for choice, why, fix in reasons)
    raise ConfigError(f"this version launches none of the {len(reasons)} candidates\n{lines}")


def _named(choice: Choice) -> str:
    return f"{choice.accelerator or 'no GPU'}{' spot' if choice.use_spot else ''} on {choice.infra}"


def _reason(job: JobSpec, choice: Choice, first: Choice | None) -> tuple[str, str] | None:
    """Why a choice is not launched, and what would help; None where it is."""
    if not choice.tasks:
        return "this machine is not mixed with other places", "keep it in a job of its own"
    if choice.head.kind == "api-server":
        return (
            "SkyPilot's API server runs requests and its administrator's plugins, and no process of a run's own",
            "write head: cluster; the head is then a small cluster, which needs no credentials either",
        )
    if choice.head.kind == "cluster" and not choice.head.own:
        return (
            f"lighthouse and controller would run on {choice.head.cluster}, with all groups, and be lost with them",
            "write head: here; the hosts then dial this machine, at --head-address",
        )
    if job.lighthouse.kind == "torchft" and any(host.nodes > 1 for host in choice.hosts):
        return (
            "one group would take several hosts, and TorchFT's lighthouse is not told when one of them is lost",
            "leave lighthouse out, or ask for fewer GPUs a group",
        )
    if is_tunnelled(choice) and (reason := _no_tunnel(job, choice)):
        return reason
    accelerator = job.resources.candidates()[0].accelerator  # the one that devices are counted by
    wanted = accelerator.count if accelerator else 0
    if choice.gpus_per_group != wanted:
        return (
            f"a group has {choice.gpus_per_group} GPUs there, and {wanted} in the first candidate",
            "ask for as many everywhere",
        )
    if first is not None and is_tunnelled(choice) != is_tunnelled(first):
        there, here = ("with", "without") if is_tunnelled(choice) else ("without", "with")
        return (
            f"groups would average {there} a tunnel there, and {here} one in the first candidate",
            "keep candidates with and without a common network in jobs of their own",
        )
    if first is not None and choice.head.kind == "cluster" and choice.infra != first.infra:
        return (
            f"its hosts would be elsewhere than their head, {first.head.cluster} on {first.infra}",
            "keep the candidates in one place, or write head: here",
        )
    if first is not None and choice.head.kind != first.head.kind:
        return (
            f"its head would be {choice.head.kind}, that of the first candidate {first.head.kind}",
            "write head: here or head: cluster",
        )
    if first is not None and choice.hosts != first.hosts:
        mine, theirs = choice.hosts[0].nodes, first.hosts[0].nodes
        if max(mine, theirs) > 1:
            there = f"a group takes {_count_of(mine, 'host')} there and {theirs} in the first candidate"
            return (
                f"{there}, and one over several is placed once, for all candidates alike",
                "set resources.gpus_per_host to a size that all candidates have, or make it a job of its own",
            )
    return None


def _count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _no_tunnel(job: JobSpec, choice: Choice) -> tuple[str, str] | None:
    """Why hosts without a common network cannot train together; None where the tunnel carries what they need."""
    only = f"its hosts reach each other by {choice.reachability} only"
    if job.sync == EVERY_STEP:
        return (
            f"{only}, and the tunnel through the head is for averages every n steps",
            "let all groups share one host (and keep no spare one), choose another place, or write sync: diloco(20)",
        )
    if job.lighthouse.kind == "torchft":
        return (
            f"{only}, and TorchFT's lighthouse knows no rendezvous that a tunnel reaches",
            "leave lighthouse out",
        )
    if choice.head.kind != "here":
        return (
            f"{only}, so nobody could dial a head that is one of them",
            "write head: here; the hosts then dial this machine, at --head-address",
        )
    return None


def rehearsal(job: JobSpec, hosts: int) -> Launchable:
    """Several hosts that are all this machine.

    Args:
        job: The job, which runs on this machine.
        hosts: How many.

    Raises:
        ConfigError: They cannot be.
    """
    if job.places() != ("local",):
        raise ConfigError(
            f"--hosts rehearses hosts on this machine, and the job runs on {', '.join(job.places())}",
            hint="leave --hosts out: the plan says how many hosts there are",
        )
    each = hosts // job.replicas  # hosts of one group, where it has several
    shared, split = 1 <= hosts <= job.replicas, each > 0 and not hosts % job.replicas
    if not shared and not (split and not job.ranks_per_replica % each):
        wide = [k for k in range(2, job.ranks_per_replica + 1) if job.ranks_per_replica % k == 0]
        several = " or ".join(str(k * job.replicas) for k in wide[:3])
        raise ConfigError(
            f"--hosts {hosts}: there are {job.replicas} replica groups, and each host has one at least, or an equal "
            f"part of the {job.ranks_per_replica} ranks of one",
            hint=f"give 1 to {job.replicas}" + (f", or {several}" if several else ""),
        )
    if job.lighthouse.kind == "torchft":
        raise ConfigError(
            "lighthouse: TorchFT's knows no authentication, and hosts reach theirs over TLS",
            hint="leave lighthouse out, or --hosts",
        )
    if job.head == "api-server":
        raise ConfigError(
            "head: api-server: SkyPilot's API server runs no process of a run's own",
            hint="write head: cluster, or leave it out",
        )
    if any(candidate.use_spot for candidate in job.resources.candidates()):
        raise ConfigError(
            "resources.use_spot: this machine is no spot capacity", hint="leave use_spot out for a rehearsal"
        )
    if any(candidate.accelerator for candidate in job.resources.candidates()):
        raise ConfigError(
            "--hosts rehearses hosts on this machine, and each would count its GPUs from 0",
            hint="leave resources.accelerators out for a rehearsal",
        )
    nodes = max(1, each)
    if job.recovery.spare and nodes > 1:
        raise ConfigError(
            "recovery.spare: a spare host takes whole groups only, and here each has several hosts",
            hint=f"leave it out, or give --hosts {job.replicas}",
        )
    groups = -(-job.replicas // hosts)
    shape = Shape(gpus=0, groups=groups, nodes=nodes, sets=hosts // nodes, unused=0)
    choice = Choice(
        infra="local",
        accelerator=None,
        use_spot=False,
        instance=None,
        image=None,
        hosts=host_sets(job.name, replicas=job.replicas, shape=shape, spare=job.recovery.spare),
        reachability="one host",
        head=Head(kind="cluster", cluster=head_name(job.name), own=True)
        if job.head == "cluster"
        else Head(kind="here"),
        usd_per_hour=0.0,
        price_day=None,
        price_source=None,
        notes=("each host is an agent of this machine",),
        tasks=(),
    )
    return Launchable(choices=(choice,))


def plan_remote(
    local: LocalPlan,
    chosen: Launchable,
    *,
    address: str | None,
    authority: Mapping[str, Any],
    identities: Mapping[str, Mapping[str, str]],
    shipment: Shipment | None,
) -> RemotePlan:
    """Plan a run beyond this machine.

    Args:
        local: The same job as a run of this machine, whose only host is called ``head``.
        chosen: What is launched.
        address: Where hosts dial the head: an address of this machine. None: the head is a cluster.
        authority: The run's own, which issues each host its certificate. Secret.
        identities: Certificates of ``agent`` (the head's), ``controller`` and ``lighthouse``. Secret.
        shipment: What each host gets; None where hosts are of this machine.

    Raises:
        ConfigError: What the head would have to be told is too long.
    """
    provider = "local" if shipment is None else "skypilot"
    choices = chosen.choices
    if shipment is not None:
        choices = tuple(_brought(choice, shipment, local.run_dir) for choice in choices)
    private = {**local.files["private.json"], "authority": dict(authority), "identities": dict(identities)}
    hosts = [{"name": host.cluster, "groups": list(host.groups)} for host in chosen.hosts]
    names = [host.cluster for host in chosen.hosts]
    run_json = {**local.run_json, "infra": choices[0].infra, "provider": provider, "hosts": names}
    config = local.files["controller.json"]
    provisioner = {
        **{key: config[key] for key in ("run_id", "run_dir", "private", "sockets", "job")},
        "provider": provider,
        "choices": [choice.to_json() for choice in choices],
        "ship": None if shipment is None else shipment.to_json(local.run_dir),
        "autodown_minutes": IDLE_MINUTES,
    }
    if address is None:
        away = _away(local, chosen, hosts, provider, private)
        # What was exported here says nothing about another machine; SkyPilot, which is here, has to have it.
        private |= {"base_env": {}, "shell_env": private["base_env"]}
        files: dict[str, Any] = {
            "job.json": local.files["job.json"],
            "private.json": private,
            "controller.json": {"injections": config["injections"], "hosts": hosts},
            "provisioner.json": {**provisioner, "head": {"cluster": away.cluster, "told": dict(away.told)}},
        }
        argv = _provisioner_argv(local)
        run_json = {**run_json, "head": away.cluster, "python": argv[0]}
    else:
        if provider != "local":
            private |= {"base_env": {}, "shell_env": private["base_env"]}
        files = head_files(
            local,
            hosts=hosts,
            choices=len(choices),
            address=address,
            tunnelled=is_tunnelled(choices[0]),
        )
        services = [*files["agent.json"]["services"], _provisioner(local)]
        files["agent.json"] = {**files["agent.json"], "services": services}
        files |= {"private.json": private, "provisioner.json": provisioner}
        argv = list(local.agent_argv)
    head = dataclasses.replace(local, files=files, run_json=run_json, agent_argv=argv)
    return RemotePlan(
        head=head,
        choices=choices,
        left_out=chosen.left_out,
        provider=provider,
        address=address,
        shipment=shipment,
    )


def _away(
    local: LocalPlan,
    chosen: Launchable,
    hosts: list[dict[str, Any]],
    provider: str,
    private: Mapping[str, Any],
) -> Away:
    """What the head is told, where it is a cluster."""
    config, run_json = local.files["controller.json"], local.run_json
    told = {
        "run_id": local.run_id,
        "version": run_json["version"],
        "head": {
            "job": dict(local.files["job.json"]),
            "infra": chosen.choices[0].infra,
            "hosts": hosts,
            "choices": len(chosen.choices),
            "per_host": groups_per_host(chosen.choices[0].accelerator, chosen.choices[0].gpus_per_group),
            "injections": list(config["injections"]),
            "collect_s": COLLECT_S,
            "address": LOOPBACK if provider == "local" else None,
        },
    }
    cluster = chosen.choices[0].head.cluster
    if cluster is None:
        raise ConfigError("the plan names no cluster for the head", hint="write head: here")
    secret = {key: private[key] for key in ("token", "envs", "secrets", "authority", "identities")}
    away = Away(cluster=cluster, told=told, secret=secret)
    away.check()
    return away


def _brought(choice: Choice, shipment: Shipment, run_dir: Path) -> Choice:
    tasks = tuple(
        (
            cluster,
            json.dumps(
                shipped(
                    task,
                    ship_id=shipment.wheel.ship_id,
                    files=shipment.files_of(run_dir),
                    workdir=None if cluster == choice.head.cluster else shipment.workdir_of(run_dir),
                )
            ),
        )
        for cluster, task in choice.documents()
    )
    return dataclasses.replace(choice, tasks=tasks)


def _provisioner(local: LocalPlan) -> dict[str, Any]:
    """The service that brings hosts up, where the head is here."""
    like = local.files["agent.json"]["services"][-1]
    return {
        **like,
        "name": "provisioner",
        "argv": _provisioner_argv(local),
        "log": str(local.run_dir / "provisioner.log"),
        "pid_file": str(local.run_dir / "provisioner.pid"),
    }


def _provisioner_argv(local: LocalPlan) -> list[str]:
    return [local.agent_argv[0], "-m", "sky_monarch.provision", str(local.run_dir / "provisioner.json")]
