"""From a job to a launched run: overrides, injections, plan, launch."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sky_monarch.errors import ConfigError
from sky_monarch.launch import local
from sky_monarch.launch.cluster_plan import ClusterPlan, plan_clusters
from sky_monarch.launch.environment import caller_value, job_environment, state_dir
from sky_monarch.launch.folder import Phase, RunFolder, list_runs, new_run_id
from sky_monarch.launch.plan import LocalPlan, plan_local
from sky_monarch.sdk.run import Run

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["Job", "launch_job", "plan_anywhere", "plan_job"]

#: What ``up`` takes: a path, or a job that is loaded already.
Job: TypeAlias = "str | Path | JobSpec"

#: What makes two jobs the same one: all of ``job.json``, and of the other files what the job decides.
_SAME: dict[str, tuple[str, ...]] = {
    "job.json": (),
    "private.json": ("envs", "secrets"),
    "controller.json": ("injections",),
}


def _load(job: Job, env: Mapping[str, str | None], secret: Mapping[str, str | None]) -> JobSpec:
    from sky_monarch.config import JobSpec, load_job

    if not isinstance(job, JobSpec):
        return load_job(Path(job), env_overrides=env, secret_overrides=secret)
    if not env and not secret:
        return job
    private = job.private_values()
    for section, other, overrides in (("envs", "secrets", env), ("secrets", "envs", secret)):
        for key, value in overrides.items():
            found = caller_value(key) if value is None else value
            if found is None:
                raise ConfigError(
                    f"{section}: {key} is not set in your environment", hint=f"export it, or give {key}=VALUE"
                )
            private[section][key] = found
            private[other].pop(key, None)
    public = {**job.public_dict(), **{section: sorted(values) for section, values in private.items()}}
    return JobSpec.from_public(public, private)


def _named(job: JobSpec, name: str) -> JobSpec:
    from pydantic import TypeAdapter, ValidationError

    from sky_monarch.config.fields import JobName, slug

    try:
        TypeAdapter(JobName).validate_python(name)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"the name of a run {message}", hint=f"{slug(name)!r} would do") from None
    return job.model_copy(update={"name": name})


def _prepared(
    job: Job,
    *,
    name: str | None,
    env: Mapping[str, str | None] | None,
    secret: Mapping[str, str | None] | None,
) -> JobSpec:
    spec = _load(job, env or {}, secret or {})
    return spec if name is None else _named(spec, name)


def plan_anywhere(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
) -> ClusterPlan:
    """Plan hosts, groups and price, wherever the job runs. Asks nobody, starts nothing.

    Raises:
        ConfigError: The job cannot be used, or can be nowhere that it names.
    """
    return plan_clusters(_prepared(job, name=name, env=env, secret=secret))


def plan_job(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
    inject: Iterable[str] = (),
) -> LocalPlan:
    """Check everything that can be checked before anything is started, and plan the run.

    Raises:
        ConfigError: The job, an override or an injection cannot be used, or this version does not launch there.
    """
    from sky_monarch import __version__
    from sky_monarch.config import parse_injection, require_supported

    spec = _prepared(job, name=name, env=env, secret=secret)
    if spec.places() != ("local",):
        plan_clusters(spec)  # what is wrong with it comes before what this version cannot do yet
    require_supported(spec)
    injections = [
        parse_injection(text, replicas=spec.replicas, ranks_per_replica=spec.ranks_per_replica).to_wire(
            number
        )
        for number, text in enumerate(inject, start=1)
    ]
    public = {**spec.public_dict(), "workdir": str(spec.resolved_workdir())}
    if not Path(public["workdir"]).is_dir():
        raise ConfigError(f"workdir {public['workdir']} is no folder")
    return plan_local(
        public,
        spec.private_values(),
        run_id=new_run_id(spec.name),
        state=state_dir(),
        temporary=Path(tempfile.gettempdir()),
        python=sys.executable,
        version=__version__,
        token=secrets.token_hex(32),
        base_env=job_environment(),
        injections=injections,
    )


def launch_job(job: Job, *, timeout_s: float, **options: Any) -> Run:
    """Plan and launch; or, where a run of this very job was lost, take that one up again.

    Args:
        job: What to launch.
        timeout_s: Longest wait for the controller to answer.
        **options: Those of :func:`plan_job`.

    Returns:
        The run; ``resumed`` says which of the two it is.

    Raises:
        ConfigError: The job cannot be used; nothing was started.
        RunExistsError: A live run has its name.
        LaunchError: It did not come up; what had started was ended.
    """
    plan = plan_job(job, **options)
    if (lost := _lost(plan)) is not None and lost.resume(timeout_s=timeout_s):
        return lost
    run = Run(RunFolder(plan.run_dir))
    local.launch(plan, ready=lambda _: run.answers(), deadline_s=timeout_s)
    return run


def _lost(plan: LocalPlan) -> Run | None:
    """The newest run of that name, where it was lost and is of the same job."""
    named = [folder for folder in list_runs(plan.state) if folder.name == plan.name]
    if not named or named[-1].phase() is not Phase.LOST or not named[-1].resumable:
        return None
    folder = named[-1]
    try:
        files = {name: json.loads((folder.path / name).read_bytes()) for name in _SAME}
    except (OSError, ValueError):
        return None
    same = all(
        files[name].get(key) == plan.files[name].get(key)
        for name, keys in _SAME.items()
        for key in keys or plan.files[name]
    )
    return Run(folder) if same else None
