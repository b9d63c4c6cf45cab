"""From a job to a launched run: overrides, injections, plan, launch."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sky_monarch.errors import ConfigError
from sky_monarch.launch import local
from sky_monarch.launch.environment import job_environment, state_dir
from sky_monarch.launch.folder import RunFolder, new_run_id
from sky_monarch.launch.plan import LocalPlan, plan_local
from sky_monarch.sdk.run import Run

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["Job", "launch_job", "plan_job"]

#: What ``up`` takes: a path, or a job that is loaded already.
Job: TypeAlias = "str | Path | JobSpec"


def _absolute(public: dict[str, Any], base: Path) -> dict[str, Any]:
    """Paths of the job, seen from the folder of its file."""

    def resolve(path: str) -> str:
        expanded = Path(path).expanduser()
        return str((base / expanded).resolve() if not expanded.is_absolute() else expanded)

    public["workdir"] = resolve(public["workdir"])
    if public.get("checkpoint"):
        public["checkpoint"] = {**public["checkpoint"], "to": resolve(public["checkpoint"]["to"])}
    return public


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
        ConfigError: The job, an override or an injection cannot be used.
    """
    from sky_monarch import __version__
    from sky_monarch.config import apply_overrides, load_job, parse_injection

    base = Path.cwd() if not isinstance(job, str | Path) else Path(job).absolute().parent
    spec = load_job(Path(job)) if isinstance(job, str | Path) else job
    spec = apply_overrides(spec, name=name, env=env or {}, secret=secret or {})
    if spec.infra != "local":
        raise ConfigError(f"infra {spec.infra!r} cannot be used yet", hint="use `infra: local`")
    injections = [
        parse_injection(text, replicas=spec.replicas, ranks_per_replica=spec.ranks_per_replica).to_wire(number)
        for number, text in enumerate(inject, start=1)
    ]
    public = _absolute(spec.public_dict(), base)
    if not Path(public["workdir"]).is_dir():
        raise ConfigError(f"workdir {public['workdir']} is not a folder", hint="it is seen from the job file's folder")
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


def launch_job(job: Job, *, timeout_s: float, **options: Any) -> RunFolder:
    """Plan and launch.

    Args:
        job: What to launch.
        timeout_s: Longest wait for the controller to answer.
        **options: Those of :func:`plan_job`.

    Raises:
        ConfigError: The job cannot be used; nothing was started.
        RunExistsError: A live run has its name.
        LaunchError: It did not come up; what had started was ended.
    """
    plan = plan_job(job, **options)
    with Run(RunFolder(plan.run_dir)) as probe:
        return local.launch(plan, ready=lambda _: probe.answers(), deadline_s=timeout_s)
