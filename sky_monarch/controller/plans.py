"""What agents are given: the job turned into plans of the protocol. But for ``room`` no file is read."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sky_monarch.config import JobSpec, rank_command
from sky_monarch.config.checkpoint_target import folder_of
from sky_monarch.config.sync import EVERY_STEP
from sky_monarch.controller import model
from sky_monarch.controller.placing import places_of
from sky_monarch.controller.room import Room, find_room
from sky_monarch.controller.settings import Settings
from sky_monarch.controller.spans import Place
from sky_monarch.controller.spans import places_of as parts_of
from sky_monarch.errors import ConfigError

__all__ = ["DEVICE_ENV", "Plans", "build_environment"]

DEVICE_ENV = "HIP_VISIBLE_DEVICES"
"""The one mask that ranks get, where their host hides nothing: else theirs is of what it leaves them."""

_MIB = 1024 * 1024
_INHERITED = "SKY_MONARCH_"
_QUORUM_RETRIES = "TORCHFT_QUORUM_RETRIES"
_QUORUM_RETRY_S = 0.25
"""Pause between two tries: TorchFT divides the time of a quorum by their number."""


def build_environment(
    base: Mapping[str, str], envs: Mapping[str, str], secrets: Mapping[str, str], *, python: str
) -> dict[str, str]:
    """The environment of setup and ranks, before the agent adds its own variables.

    Where the shell that typed ``up`` had no virtual environment active, the folder of ``python`` comes first
    in ``PATH``: ``python`` in a job means the one that sky-monarch is installed in. A ``PATH`` that the job
    sets itself stays as it is.

    Args:
        base: Environment of that shell; empty where hosts are other machines, which have their own.
        envs: The job's variables.
        secrets: The job's secret variables; they win over both.
        python: Interpreter that runs sky-monarch.
    """
    # An `up` typed inside a rank must not hand that rank's identity on.
    env = {name: value for name, value in base.items() if not name.startswith(_INHERITED)}
    if base and not env.get("VIRTUAL_ENV") and not env.get("CONDA_PREFIX"):
        own = str(Path(python).parent)
        folders = [folder for folder in env.get("PATH", os.defpath).split(os.pathsep) if folder != own]
        env["PATH"] = os.pathsep.join([own, *folders])
    return {**env, **envs, **secrets}


class Plans:
    """Builds the commands of one run.

    Args:
        settings: What the controller was told.
        python: Interpreter that runs sky-monarch.

    Raises:
        ConfigError: The job and the hosts do not fit.
    """

    def __init__(self, settings: Settings, *, python: str = sys.executable) -> None:
        self._settings = settings
        private = {"envs": settings.envs, "secrets": settings.secrets}
        job = JobSpec.from_public(settings.job, private)
        self._job = job
        self._workdir = job.resolved_workdir(settings.run_dir)
        self._envs = build_environment(settings.base_env, settings.envs, settings.secrets, python=python)
        self._devices_per_rank = _devices_per_rank(job)
        self._replicas, self._places = job.replicas, places_of(settings.hosts)
        self._parts = parts_of(settings.hosts, ranks=job.ranks_per_replica)
        self.limits = model.Limits(
            replicas=job.replicas,
            min_replicas=job.min_replicas,
            ranks_per_replica=job.ranks_per_replica,
            max_restarts=job.recovery.max_restarts,
            window_s=job.recovery.window_s,
            backoff_s=job.recovery.backoff_s,
            backoff_max_s=job.recovery.backoff_max_s,
            grace_s=job.recovery.grace_s,
            idle_limit_s=None if job.recovery.idle_limit_s == "off" else float(job.recovery.idle_limit_s),
            last_saves=job.checkpoint is not None and job.recovery.on_notice == "leave",
            **settings.limits,
        )
        self.archive_bytes = job.logs.archive_mib * _MIB
        self.has_setup = bool(job.setup.strip())
        self.checkpoint_target = None if job.checkpoint is None else self._checkpoint()["to"]

    def place(self, hosts: Mapping[str, Sequence[int]], replicas: int) -> None:
        """The run was scaled.

        Args:
            hosts: Replica groups by host.
            replicas: How many it is to have.
        """
        self._replicas, self._places = replicas, places_of(hosts)

    def command(self, action: model.Action, *, fired: Collection[int] = ()) -> dict[str, Any]:
        """The protocol's command for what the policy wants.

        Args:
            action: Not a timer.
            fired: Injections that were carried out already.
        """
        match action:
            case model.Setup():
                return {"type": "setup", **self.setup()}
            case model.StartGroup():
                plan = self.group(
                    action.replica,
                    generation=action.generation,
                    max_restarts=action.max_restarts,
                    spent_s=action.spent_s,
                    fired=fired,
                    part=self._parts.get(action.host),
                    store=action.store,
                )
                return {"type": "start_group", **plan}
            case model.StopGroup():
                return {
                    "type": "stop_group",
                    "replica": action.replica,
                    "grace_s": action.grace_s,
                    "reason": action.reason,
                }
            case model.EndGeneration():
                return {
                    "type": "end_generation",
                    "replica": action.replica,
                    "generation": action.generation,
                    "reason": action.reason,
                }
            case model.Release():
                return {"type": "release"}
            case model.WhoSaves():
                return {"type": "who_saves", "replica": action.replica, "reason": action.reason}
            case model.Probe():
                targets = [
                    {"host": one.host, "attempt": one.attempt, "address": one.address}
                    for one in action.targets
                ]
                return {"type": "probe", "targets": targets, "deadline_s": action.deadline_s}
            case model.Shutdown():
                return {"type": "shutdown", "grace_s": action.grace_s, "reason": action.reason}
            case _:
                raise TypeError(f"{type(action).__name__} is not for an agent")

    def room(self) -> Room:
        """How many groups the run has room for. Looks at this machine."""
        candidates = self._job.resources.candidates()
        return find_room(
            self._settings.job,
            devices_per_group=self._devices_per_rank * self._job.ranks_per_replica,
            cpus_per_group=candidates[0].cpus,
            hosts=self._settings.hosts,
            provisioner=self._settings.run_dir / "provisioner.json",
            base_env=self._settings.base_env,
            away=bool(self._settings.collect_s),
            is_sized=any(one.cpus or one.memory_gib for one in candidates),
            told=self._settings.per_host,
        )

    def setup(self) -> dict[str, Any]:
        """The ``SetupPlan`` of every host."""
        return {
            "script": self._job.setup,
            "workdir": str(self._workdir),
            "envs": dict(self._envs),
            "timeout_s": self._job.setup_timeout_s,
        }

    def group(
        self,
        replica: int,
        *,
        generation: int,
        max_restarts: int,
        spent_s: Sequence[float] = (),
        fired: Collection[int] = (),
        part: Place | None = None,
        store: str | None = None,
    ) -> dict[str, Any]:
        """The ``GroupPlan`` of one replica group, or of one host's part of it.

        Args:
            replica: Which.
            generation: Of its first start.
            max_restarts: Lease of restarts; at most the job's.
            spent_s: How long ago the others were spent.
            fired: Injections that were carried out already.
            part: Which one; None for a group that has one host.
            store: Where another host of the group serves its store.
        """
        job, recovery = self._job, self._job.recovery
        ranks = range(job.ranks_per_replica) if part is None else part.ranks
        devices = self._devices(replica, len(ranks))
        return {
            "replica": replica,
            # A group that the run was scaled below may still start again before it is told.
            "replicas": max(self._replicas, replica + 1),
            "world_size": len(ranks),
            "span": None if part is None else self._span(part, store),
            "generation": generation,
            "command": rank_command(job.run),
            "workdir": str(self._workdir),
            "envs": {**self._envs, **self._rank_variables()},
            "devices": devices,
            "device_env": DEVICE_ENV if devices else None,
            "lighthouse": self._lighthouse_url(),
            "lighthouse_control": self._settings.lighthouse_control,
            "recovery": {
                "max_restarts": min(max_restarts, recovery.max_restarts),
                "window_s": recovery.window_s,
                "spent_s": list(spent_s),
                "backoff_s": recovery.backoff_s,
                "backoff_max_s": recovery.backoff_max_s,
                "startup_limit_s": None if recovery.startup_limit_s == "off" else recovery.startup_limit_s,
                "progress_limit_s": recovery.progress_limit_s,
                "grace_s": recovery.grace_s,
                "standby": recovery.standby,
                "standby_until": recovery.standby_until,
                "standby_start": recovery.standby_start,
            },
            "preload": list(job.preload) if recovery.standby else [],
            "injections": [
                dict(injection)
                for injection in self._settings.injections
                if injection["slot"]["replica"] == replica
                and injection["slot"]["rank"] in ranks
                and injection["id"] not in fired
            ],
            "log_segment_bytes": job.logs.segment_mib * _MIB,
            "log_segments": job.logs.segments,
        }

    def _lighthouse_url(self) -> str:
        """TLS beyond this machine, where ours serves nothing else; TorchFT's knows no TLS."""
        address = self._settings.lighthouse_address
        host = address.rpartition(":")[0].strip("[]")
        is_near = host == "localhost" or ipaddress.ip_address(host).is_loopback
        is_plain = (is_near and not self._settings.tls) or self._settings.lighthouse_kind == "torchft"
        return f"{'http' if is_plain else 'https'}://{address}"

    def _rank_variables(self) -> dict[str, str]:
        """What only the controller knows; the agent adds what it knows."""
        timeouts = self._job.lighthouse.timeouts()
        variables = {
            "SKY_MONARCH_MIN_REPLICAS": str(self._job.min_replicas),
            "SKY_MONARCH_LIGHTHOUSE_KIND": self._settings.lighthouse_kind,
            "SKY_MONARCH_TIMEOUTS": json.dumps(timeouts),
        }
        # TorchFT's default is none: then a lighthouse that dies with requests under way, and is back at once,
        # ends every process that asked, in all groups, and with them the state that all of them held.
        retries = max(1, math.ceil(timeouts["quorum_timeout_s"] / _QUORUM_RETRY_S))
        if _QUORUM_RETRIES not in self._envs:
            variables[_QUORUM_RETRIES] = str(retries)
        if self._job.sync != EVERY_STEP:
            variables["SKY_MONARCH_SYNC"] = self._job.sync
        if self._job.recovery.healing != "striped":
            variables["SKY_MONARCH_HEALING"] = self._job.recovery.healing
        if self._job.checkpoint is not None:
            variables["SKY_MONARCH_CHECKPOINT"] = json.dumps(self._checkpoint())
        return variables

    def _checkpoint(self) -> dict[str, Any]:
        checkpoint = self._job.checkpoint
        if checkpoint is None:
            return {}
        plan = {
            "to": checkpoint.to,
            "every_steps": checkpoint.every_steps,
            "keep": checkpoint.keep,
            "on_notice": self._job.recovery.on_notice,
        }
        folder = folder_of(checkpoint.to)
        if folder is None:
            # Outlives a rank, whose replacement goes on with the upload.
            return {**plan, "staging": str(self._settings.run_dir / "checkpoints")}
        return {**plan, "to": os.path.normpath(self._workdir / Path(folder).expanduser())}

    def ranks_on(self, host: str) -> range:
        """The ranks of each group that are on a host: all, but where the group has several hosts."""
        part = self._parts.get(host)
        return range(self._job.ranks_per_replica) if part is None else part.ranks

    def _span(self, part: Place, store: str | None) -> dict[str, Any]:
        return {
            "node": part.node,
            "nodes": part.nodes,
            "first_rank": part.ranks.start,
            "ranks": self._job.ranks_per_replica,
            "store": store,
        }

    def _devices(self, replica: int, ranks: int) -> list[list[int]]:
        """Device indices by local rank: groups of one host lie side by side in the order of its list."""
        each = self._devices_per_rank
        if not each:
            return []
        first = self._places[replica] * each * ranks
        return [list(range(first + rank * each, first + (rank + 1) * each)) for rank in range(ranks)]


def _devices_per_rank(job: JobSpec) -> int:
    """Accelerators of one rank, as the most wanted candidate of ``resources`` has them."""
    accelerator = job.resources.candidates()[0].accelerator
    if accelerator is None:
        return 0
    if accelerator.count % job.ranks_per_replica:
        raise ConfigError(
            f"{accelerator} cannot be shared out evenly among ranks_per_replica: {job.ranks_per_replica}",
            hint="make resources.accelerators a multiple of ranks_per_replica",
        )
    return accelerator.count // job.ranks_per_replica
