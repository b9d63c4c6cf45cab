"""How many replica groups there is room for: devices and cores of this machine, or hosts that can be asked for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.placement import groups_per_host

if TYPE_CHECKING:
    from sky_monarch.controller.model import State

__all__ = ["Room", "devices_here", "find_room", "room_after"]

_MOST = 16_384  # that the lighthouse knows
_RANKS_A_CORE = 32
"""Of a job that asks for no cores: more processes than that on one core only wait for each other."""
_TOGETHER = "one host"
_HOST = re.compile(r"(.+)-h(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where groups may be.

    Attributes:
        most: Groups that there is room for.
        reason: Why no more.
        fix: What would help.
        per_host: Groups on one host that is provisioned.
        asked: Groups for whose cores and memory each host was asked, where the job asks for any and the host has
            groups from the beginning; others were asked for as the first one, which has the most.
        stem: Of the names of hosts that are provisioned, ``<stem>-h<k>``.
    """

    most: int = _MOST
    reason: str = f"a lighthouse knows {_MOST} at the most"
    fix: str = f"give {_MOST} or fewer"
    per_host: int = 1
    asked: Mapping[str, int] = field(default_factory=dict)
    stem: str = "host"

    def require(self, replicas: int) -> None:
        """Refuse more groups than there is room for.

        Raises:
            ConfigError: There are more.
        """
        if replicas > self.most:
            raise ConfigError(
                f"there is room for {self.most} replica groups, not for {replicas}: {self.reason}",
                hint=self.fix,
            )

    def on(self, host: str) -> int:
        """Groups that a host takes."""
        return min(self.per_host, self.asked.get(host, self.per_host))

    def name_of(self, number: int) -> str:
        """Name of a host."""
        return f"{self.stem}-h{number}"

    def next_number(self, hosts: Iterable[str]) -> int:
        """Number of a host that there never was."""
        numbers = [
            int(found[2]) for name in hosts if (found := _HOST.fullmatch(name)) and found[1] == self.stem
        ]
        return max(numbers, default=-1) + 1


def find_room(
    job: Mapping[str, Any],
    *,
    devices_per_group: int,
    cpus_per_group: str | None,
    hosts: Mapping[str, tuple[int, ...]],
    provisioner: Path,
    base_env: Mapping[str, str],
    devices: Callable[[Mapping[str, str]], int | None] | None = None,
    away: bool = False,
    is_sized: bool = False,
    told: int = 0,
) -> Room:
    """How many groups a run has room for.

    Args:
        job: The public JobSpec.
        devices_per_group: Accelerators of one group.
        cpus_per_group: Cores of one group, ``16+``; None where the job asks for none.
        hosts: Groups by host, as the run began.
        provisioner: Path of ``provisioner.json``; there is none for a run of this machine alone.
        base_env: Of the shell that launched the run: its device mask counts.
        devices: Counts this machine's.
        away: This machine is a head alone, and has no plan.
        is_sized: The job asks for cores or memory, so that each host was asked for those of its groups alone.
        told: Groups that one host has GPUs for, as a head that is a cluster was told; 0: the plan has it.
    """
    try:
        choices = json.loads(provisioner.read_bytes())
        provider, choice = choices["provider"], choices["choices"][0]
    except (OSError, ValueError, LookupError, TypeError):
        provider, choice = None, {}
    ranks = int(job.get("ranks_per_replica", 1))
    elsewhere = away or provider not in (None, "local")
    asked = {name: len(mine) for name, mine in hosts.items() if mine} if is_sized and elsewhere else {}
    fullest = max(len(mine) for mine in hosts.values())
    # GPUs alone say nothing of the cores and the memory that more groups would need there.
    per_host = fullest if asked else max(told or _fit(choice), fullest)
    if away:
        room = Room()
    elif provider in (None, "local"):
        room = _room_here(
            ranks=ranks,
            devices_per_group=devices_per_group,
            cpus_per_group=cpus_per_group,
            devices=(devices or devices_here)(base_env),
        )
    else:
        room = _room_elsewhere(choice, per_host)
    names = [found for name in hosts if (found := _HOST.fullmatch(name))]
    return Room(
        most=room.most,
        reason=room.reason,
        fix=room.fix,
        per_host=per_host,
        asked=asked,
        stem=names[0][1] if names else str(job.get("name", "host")),
    )


def room_after(room: Room, state: State) -> Room:
    """The same in the place that the job has moved to: as many on a host as it has there."""
    if not state.placement:
        return room
    filled = [len(host.replicas) for host in state.hosts if host.provisioned and host.replicas]
    per_host = max(filled, default=1)
    most = per_host if len(filled) == 1 and room.most < _MOST else room.most
    asked = {}
    if began := sum(room.asked.values()):  # none of these groups was placed before the job had moved
        counts = {host.name: sum(one < began for one in host.replicas) for host in state.hosts}
        asked = {name: count for name, count in counts.items() if count}
    return replace(room, most=max(most, len(state.groups)), per_host=per_host, asked=asked)


def _fit(choice: Mapping[str, Any]) -> int:
    """Groups that one host of a choice has GPUs for."""
    return groups_per_host(choice.get("accelerator"), int(choice.get("gpus_per_group") or 0))


def _room_elsewhere(choice: Mapping[str, Any], per_host: int) -> Room:
    if choice.get("reachability") != _TOGETHER:
        return Room()
    # What hosts of this place are to each other was never asked: the plan has one.
    return Room(
        most=per_host,
        reason="the plan has all groups on one host",
        fix=f"give {per_host} or fewer, or start the job again with as many replicas",
    )


def _room_here(
    *, ranks: int, devices_per_group: int, cpus_per_group: str | None, devices: int | None
) -> Room:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = float((cpus_per_group or "0").removesuffix("+"))
    bounds = []
    if devices_per_group and devices is not None:
        each = f"{devices_per_group} for each group"
        bounds.append((devices // devices_per_group, f"this machine has {devices} accelerators, {each}"))
    if asked:
        bounds.append((int(cores / asked), f"this machine has {cores} cores, {asked:g} for each group"))
    bounds.append((_RANKS_A_CORE * cores // ranks, f"this machine has {cores} cores"))
    most, reason = min(bounds)
    return Room(most=most, reason=reason, fix=f"give {most} or fewer, or let the job run on more hosts")


def devices_here(base_env: Mapping[str, str]) -> int | None:
    """Accelerators of this machine that a job may use; None where nobody can tell."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if (mask := base_env.get(name)) is not None:
            return len([one for one in mask.split(",") if one.strip()])
    amd = 0
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            # A node without SIMD units is a CPU.
            amd += any(line.split()[1] != "0" for line in properties.read_text().splitlines()
                       if line.startswith("simd_count"))  # fmt: skip
        except (OSError, IndexError):
            return None
    nvidia = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return amd or nvidia or None
