"""What was probably meant by a key that no field of the job file has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

__all__ = ["SYNONYMS", "suggest"]

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(
            ("num_workers", "workers", "num_nodes", "nodes", "nnodes", "num_replicas", "replica_groups"),
            "replicas",
        ),
        **dict.fromkeys(("num_replica_groups", "world_size", "group_size", "hosts", "count"), "replicas"),
        **dict.fromkeys(
            ("min_nodes", "min_workers", "min_replica_size", "min_replica_groups", "min_size"), "min_replicas"
        ),
        **dict.fromkeys(
            ("nproc_per_node", "gpus_per_node", "procs_per_node", "ntasks_per_node"), "ranks_per_replica"
        ),
        **dict.fromkeys(
            ("nproc", "ranks", "processes", "processes_per_replica", "gpus_per_replica"), "ranks_per_replica"
        ),
        **dict.fromkeys(("env", "environment", "env_vars", "envvars", "variables"), "envs"),
        **dict.fromkeys(("command", "commands", "cmd", "script", "entrypoint", "args", "start"), "run"),
        **dict.fromkeys(("cloud", "provider", "platform", "region", "zone", "backend", "cluster"), "infra"),
        **dict.fromkeys(("working_dir", "work_dir", "working_directory", "cwd", "chdir", "dir"), "workdir"),
        **dict.fromkeys(("init", "install", "prepare", "build"), "setup"),
        **dict.fromkeys(("gpus", "gpu", "devices"), "resources.accelerators"),
        **dict.fromkeys(("memory", "mem"), "resources.memory_gib"),
        **dict.fromkeys(("cpu", "vcpus"), "resources.cpus"),
        **dict.fromkeys(("spot", "preemptible"), "resources.use_spot"),
        **dict.fromkeys(("image_id", "docker", "docker_image", "container"), "resources.image"),
        **dict.fromkeys(("imports", "preload_modules", "modules"), "preload"),
        **dict.fromkeys(
            ("restart", "restarts", "job_recovery", "restart_policy", "fault_tolerance"), "recovery"
        ),
        **dict.fromkeys(("checkpoints", "ckpt", "checkpointing"), "checkpoint"),
        **dict.fromkeys(("logging", "log"), "logs"),
        **dict.fromkeys(("cost", "costs", "money", "limits"), "budget"),
        **dict.fromkeys(("max_cost", "max_price", "max_budget"), "budget.max_usd"),
        **dict.fromkeys(
            ("time_limit", "timeout", "max_time", "max_duration", "walltime"), "budget.max_hours"
        ),
        "setup_timeout": "setup_timeout_s",
        **dict.fromkeys(
            ("sync_mode", "sync_every", "sync_steps", "semi_sync_method", "diloco", "local_steps"), "sync"
        ),
    },
    "resources": {
        **dict.fromkeys(("gpus", "gpu", "accelerator", "devices", "gpu_type"), "accelerators"),
        **dict.fromkeys(("memory", "mem", "ram", "memory_gb"), "memory_gib"),
        **dict.fromkeys(("cpu", "vcpus", "vcpu"), "cpus"),
        **dict.fromkeys(("spot", "preemptible", "interruptible"), "use_spot"),
        **dict.fromkeys(("cloud", "region", "zone", "infra", "provider"), "infra"),
        **dict.fromkeys(("image_id", "docker", "docker_image", "container"), "image"),
        **dict.fromkeys(("gpus_per_node", "host_gpus", "gpus_per_instance"), "gpus_per_host"),
    },
    "recovery": {
        **dict.fromkeys(
            ("max_restarts_on_errors", "retries", "max_retries", "restarts", "max_failures"), "max_restarts"
        ),
        **dict.fromkeys(("initial_backoff", "delay", "backoff_initial"), "backoff_s"),
        **dict.fromkeys(("backoff_max", "max_backoff"), "backoff_max_s"),
        **dict.fromkeys(("startup_timeout", "startup_timeout_s"), "startup_limit_s"),
        **dict.fromkeys(
            ("capacity_timeout", "provision_timeout", "idle_timeout", "idle_limit"), "idle_limit_s"
        ),
        **dict.fromkeys(
            ("timeout", "timeout_s", "progress_timeout", "progress_timeout_s"), "progress_limit_s"
        ),
        **dict.fromkeys(("grace_period", "grace_period_s", "termination_grace_period"), "grace_s"),
        **dict.fromkeys(("standbys", "spares", "warm"), "standby"),
        **dict.fromkeys(("start_method", "fork", "mp_start_method"), "standby_start"),
        **dict.fromkeys(("on_preemption", "preemption", "on_warning"), "on_notice"),
        **dict.fromkeys(("hot", "hot_standby", "standby_mode", "standby_kind"), "standby_until"),
    },
    "checkpoint": {
        **dict.fromkeys(("path", "dir", "folder", "directory", "output"), "to"),
        **dict.fromkeys(("interval", "every", "steps", "save_steps"), "every_steps"),
        **dict.fromkeys(("keep_last", "save_total_limit", "max_to_keep", "keep_latest_k"), "keep"),
    },
    "lighthouse": {
        "type": "kind",
        "pg_timeout": "process_group_timeout_s",
        "pg_timeout_s": "process_group_timeout_s",
        "timeout_s": "process_group_timeout_s",
    },
    "logs": {
        "max_size": "segment_mib",
        "segment_size": "segment_mib",
        "backups": "segments",
        "max_files": "segments",
    },
    "budget": {
        **dict.fromkeys(
            ("usd", "max_cost", "dollars", "max_dollars", "cost", "max_price", "money"), "max_usd"
        ),
        **dict.fromkeys(("hours", "time", "max_time", "time_limit", "timeout", "lifetime"), "max_hours"),
    },
}
"""Names of other tools (SkyPilot, torchrun, Slurm, Kubernetes, TorchFT, compose) by section; ``""`` is the
top level."""


def suggest(key: str, section: str, fields: Mapping[str, Collection[str]]) -> str | None:
    """The field that was probably meant, or None.

    Args:
        key: The unknown key.
        section: Where it stands: ``""`` or the name of a part.
        fields: Field names by section.

    Returns:
        A key of the same section, or a whole path (``recovery.max_restarts``) where it belongs into another
        one.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.strip()).replace("-", "_").replace(" ", "_").lower()
    here = fields.get(section, ())
    if name in here:
        return name
    synonym = SYNONYMS.get(section, {}).get(name)
    if synonym is not None:
        return synonym
    for unit in ("_s", "_gib", "_mib"):
        if name + unit in here:
            return name + unit
    for other, names in fields.items():
        if other != section and name in names:
            return f"{other}.{name}" if other else name
    near = difflib.get_close_matches(name, here, 1, 0.7)
    return near[0] if near else None
