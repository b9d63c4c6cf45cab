"""What a run beyond this machine consists of. Pure: reads nothing, writes nothing.

Its head is a local run without groups of its own: an agent that keeps lighthouse and controller alive, both of which
hosts reach over TLS, and the provisioner, which brings the hosts up. ``up --hosts N`` is the same with hosts that are
agents of this machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.bootstrap import shipped
from sky_monarch.launch.cluster_plan import Choice, ClusterPlan, Head
from sky_monarch.launch.offers import Reachability
from sky_monarch.launch.placement import HostSet, Shape, host_sets
from sky_monarch.launch.plan import LocalPlan
from sky_monarch.launch.shipping import Shipment
from sky_monarch.launch.tasks import IDLE_MINUTES

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["HEAD", "Launchable", "RemotePlan", "launchable", "plan_remote", "rehearsal"]

HEAD = "head"
"""Name of the head among the hosts."""

_TOGETHER = (str(Reachability.SAME_NETWORK), "one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launchable:
    """What of a plan this version launches.

    Attributes:
        choices: In the order in which they are tried, at least one; all place the groups alike.
        left_out: Choices that it does not launch, and why.
    """

    choices: tuple[Choice, ...]
    left_out: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[HostSet, ...]:
        """The hosts, in whichever choice."""
        return self.choices[0].hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """A run beyond this machine.

    Attributes:
        head: What is written and started here.
        choices: What is launched elsewhere, in the order in which it is tried.
        left_out: Choices of the plan that this version does not launch, and why.
        provider: ``skypilot``, or ``local`` for a rehearsal.
        address: Where hosts dial the head.
        shipment: What each host gets; None where hosts are of this machine.
    """

    head: LocalPlan
    choices: tuple[Choice, ...]
    left_out: tuple[str, ...]
    provider: str
    address: str
    shipment: Shipment | None

    @property
    def hosts(self) -> tuple[HostSet, ...]:
        """The hosts."""
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
    if choice.head.kind != "here":
        where = choice.head.cluster or "the API server"
        return (
            f"lighthouse and controller would run on {where}, which this version does not launch",
            "write head: here; the hosts then dial this machine, at --head-address",
        )
    if job.lighthouse.kind == "torchft" and any(host.nodes > 1 for host in choice.hosts):
        return (
            "one group would take several hosts, and TorchFT's lighthouse is not told when one of them is lost",
            "leave lighthouse out, or ask for fewer GPUs a group",
        )
    if len(choice.hosts) > 1 and choice.reachability not in _TOGETHER:
        return (
            f"its hosts reach each other by {choice.reachability} only, and this version tunnels nothing",
            "let all groups share one host, or choose a place with a common network",
        )
    accelerator = job.resources.candidates()[0].accelerator  # the one that devices are counted by
    wanted = accelerator.count if accelerator else 0
    if choice.gpus_per_group != wanted:
        return (
            f"a group has {choice.gpus_per_group} GPUs there, and {wanted} in the first candidate",
            "ask for as many everywhere",
        )
    if first is not None and choice.hosts != first.hosts:
        other, own = len(first.hosts), len(choice.hosts)
        return (
            f"it takes {own} hosts, the first candidate {other}, and this version does not place groups anew",
            "set resources.gpus_per_host to a number that both have",
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
    if any(candidate.accelerator for candidate in job.resources.candidates()):
        raise ConfigError(
            "--hosts rehearses hosts on this machine, and each would count its GPUs from 0",
            hint="leave resources.accelerators out for a rehearsal",
        )
    nodes = max(1, each)
    groups = -(-job.replicas // hosts)
    shape = Shape(gpus=0, groups=groups, nodes=nodes, sets=hosts // nodes, unused=0)
    choice = Choice(
        infra="local",
        accelerator=None,
        use_spot=False,
        instance=None,
        image=None,
        hosts=host_sets(job.name, replicas=job.replicas, shape=shape),
        reachability="one host",
        head=Head(kind="here"),
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
    address: str,
    authority: Mapping[str, Any],
    identities: Mapping[str, Mapping[str, str]],
    shipment: Shipment | None,
) -> RemotePlan:
    """Plan a run beyond this machine.

    Args:
        local: The same job as a run of this machine, whose only host is called ``head``.
        chosen: What is launched.
        address: Where hosts dial the head: an address of this machine.
        authority: The run's own, which issues each host its certificate. Secret.
        identities: Certificates of ``agent`` (the head's), ``controller`` and ``lighthouse``. Secret.
        shipment: What each host gets; None where hosts are of this machine.
    """
    provider = "local" if shipment is None else "skypilot"
    choices = chosen.choices
    if shipment is not None:
        choices = tuple(_brought(choice, shipment, local.run_dir) for choice in choices)
    files = dict(local.files)
    private = {**files["private.json"], "authority": dict(authority), "identities": dict(identities)}
    if provider != "local":
        # What was exported here says nothing about another machine; SkyPilot, which is here, has to have it.
        private |= {"base_env": {}, "shell_env": private["base_env"]}
    config = files["controller.json"]
    placed = [{"name": HEAD, "groups": [], "provisioned": False}]
    placed += [
        {"name": host.cluster, "groups": list(host.groups), "provisioned": True} for host in chosen.hosts
    ]
    files |= {
        "private.json": private,
        "lighthouse.json": _lighthouse(files["lighthouse.json"], address),
        "controller.json": {
            **config,
            "host": HEAD,
            "hosts": placed,
            "tls": True,
            "choices": len(choices),
        },
        "provisioner.json": {
            **{key: config[key] for key in ("run_id", "run_dir", "private", "sockets", "job")},
            "provider": provider,
            "choices": [choice.to_json() for choice in choices],
            "ship": None if shipment is None else shipment.to_json(local.run_dir),
            "autodown_minutes": IDLE_MINUTES,
        },
        "agent.json": _agent(files["agent.json"], local.run_dir, address),
    }
    names = [host.cluster for host in chosen.hosts]
    run_json = {**local.run_json, "infra": choices[0].infra, "provider": provider, "hosts": names}
    return RemotePlan(
        head=dataclasses.replace(local, files=files, run_json=run_json),
        choices=choices,
        left_out=chosen.left_out,
        provider=provider,
        address=address,
        shipment=shipment,
    )


def _brought(choice: Choice, shipment: Shipment, run_dir: Path) -> Choice:
    tasks = tuple(
        (
            cluster,
            json.dumps(
                shipped(
                    task,
                    ship_id=shipment.wheel.ship_id,
                    files=shipment.files_of(run_dir),
                    workdir=shipment.workdir_of(run_dir),
                )
            ),
        )
        for cluster, task in choice.documents()
    )
    return dataclasses.replace(choice, tasks=tasks)


def _any_port(address: str) -> str:
    return f"[{address}]:0" if ":" in address else f"{address}:0"


def _lighthouse(config: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Hosts reach its port, the control channel and the stores; the head's own go on using the unix socket."""
    return {
        **config,
        "tls": True,
        "control": [f"unix:{config['sockets']['lighthouse']}", f"tls:{_any_port(address)}"],
        "address": address,
    }


def _agent(config: Mapping[str, Any], run_dir: Path, address: str) -> dict[str, Any]:
    """The head's agent: its services listen where hosts reach them, and one more of them brings the hosts up."""
    port = _any_port(address)
    listens: Mapping[str, str | Sequence[str]] = {"lighthouse": [port, port], "controller": port}
    services = [{**service, "listen": listens[service["name"]]} for service in config["services"]]
    like = config["services"][-1]
    services.append(
        {
            **like,
            "name": "provisioner",
            "argv": [like["argv"][0], "-m", "sky_monarch.provision", str(run_dir / "provisioner.json")],
            "log": str(run_dir / "provisioner.log"),
            "pid_file": str(run_dir / "provisioner.pid"),
        }
    )
    return {**config, "services": services}
