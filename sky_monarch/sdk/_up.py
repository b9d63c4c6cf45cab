"""From a job to a launched run: overrides, injections, plan, launch; here, or on hosts that are brought up for it."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sky_monarch.errors import ConfigError
from sky_monarch.launch import away, local
from sky_monarch.launch.address import LOOPBACK, head_address
from sky_monarch.launch.environment import caller_value, job_environment, state_dir
from sky_monarch.launch.folder import Phase, RunFolder, list_runs, new_run_id
from sky_monarch.launch.plan import LocalPlan, plan_local
from sky_monarch.launch.remote import HEAD, RemotePlan, plan_remote, rehearsal
from sky_monarch.launch.review import Review, require_even, review
from sky_monarch.launch.runnable import require_runnable
from sky_monarch.launch.shipping import Shipment, find_shipment
from sky_monarch.launch.tunnel import is_tunnelled
from sky_monarch.launch.wheel import GIVEN
from sky_monarch.launch.workdir import Listing, list_workdir
from sky_monarch.sdk._here import require_here
from sky_monarch.sdk._needs import require_all
from sky_monarch.sdk.run import Run

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec
    from sky_monarch.launch.remote import Launchable

__all__ = [
    "Job",
    "headed",
    "launch_job",
    "launch_plan",
    "plan_job",
    "plan_run",
    "review_job",
    "shipment_of",
    "workdir_of",
]

#: What ``up`` takes: a path, or a job that is loaded already.
Job: TypeAlias = "str | Path | JobSpec"

#: What makes two jobs the same one: all of ``job.json``, and of the other files what the job decides.
_SAME: dict[str, tuple[str, ...]] = {
    "job.json": (),
    "private.json": ("envs", "secrets"),
    "controller.json": ("injections", "hosts"),
}

#: Certificates of a run outlive it. Nobody renews them: what takes longer has to be started again.
_LIFETIME_S = 400 * 86_400.0


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
    spare: int | None = None,
) -> JobSpec:
    spec = _load(job, env or {}, secret or {})
    if spare is not None:
        spec = _sparing(spec, spare)
    return spec if name is None else _named(spec, name)


def _sparing(job: JobSpec, spare: int) -> JobSpec:
    from pydantic import TypeAdapter, ValidationError

    from sky_monarch.config.fields import Spares

    try:
        kept = TypeAdapter(Spares).validate_python(spare)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"the number of spare hosts {message}") from None
    return job.model_copy(update={"recovery": job.recovery.model_copy(update={"spare": kept})})


def review_job(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
    spare: int | None = None,
    head: str | None = None,
) -> Review:
    """Plan hosts, groups and price, wherever the job runs, and say what `up` would refuse. Asks nobody, starts nothing.

    Raises:
        ConfigError: The job cannot be used, or can be nowhere that it names.
    """
    return review(headed(_prepared(job, name=name, env=env, secret=secret, spare=spare), head))


def workdir_of(job: Job, *, name: str | None = None) -> Listing:
    """Look at what of the working folder each host would get; copy nothing.

    Raises:
        ConfigError: The job or its working folder cannot be used.
    """
    return list_workdir(
        _prepared(job, name=name, env=None, secret=None).resolved_workdir(), without=state_dir()
    )


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
        ConfigError: The job, an override or an injection cannot be used, or it does not run on this machine.
    """
    spec = _prepared(job, name=name, env=env, secret=secret)
    if spec.places() != ("local",):
        raise ConfigError(
            f"the job runs on {', '.join(spec.places())}", hint="this plans runs of this machine"
        )
    review(spec).require()
    return _plan_here(spec, inject)


def _plan_here(spec: JobSpec, inject: Iterable[str], *, host: str = "local") -> LocalPlan:
    from sky_monarch import __version__
    from sky_monarch.config import parse_injection

    require_even(spec)
    injections = [
        parse_injection(text, replicas=spec.replicas, ranks_per_replica=spec.ranks_per_replica).to_wire(
            number
        )
        for number, text in enumerate(inject, start=1)
    ]
    public = {**spec.public_dict(), "workdir": str(spec.resolved_workdir())}
    if not Path(public["workdir"]).is_dir():
        raise ConfigError(f"workdir {public['workdir']} is no folder")
    base_env = job_environment()
    if spec.places() == ("local",):  # or a rehearsal, whose hosts are this machine
        require_here(spec, base_env)
    return plan_local(
        public,
        spec.private_values(),
        run_id=new_run_id(spec.name),
        state=state_dir(),
        temporary=Path(tempfile.gettempdir()),
        python=sys.executable,
        version=__version__,
        token=secrets.token_hex(32),
        base_env=base_env,
        injections=injections,
        host=host,
    )


def shipment_of(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
) -> Shipment:
    """What each host of a job would get. Copies nothing.

    Raises:
        ConfigError: The working folder, or the wheel that the caller names, cannot be used; or there is nothing to
            ship: no compiled core for Linux.
    """
    from sky_monarch import __version__

    spec = _prepared(job, name=name, env=env, secret=secret)
    given = caller_value(GIVEN)
    return find_shipment(spec.resolved_workdir(), state=state_dir(), given_wheel=given, version=__version__)


def plan_run(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
    inject: Iterable[str] = (),
    hosts: int | None = None,
    head: str | None = None,
    address: str | None = None,
    spare: int | None = None,
    is_dry: bool = False,
) -> LocalPlan | RemotePlan:
    """Check everything that can be checked before anything is started, and plan the run, wherever that is.

    Args:
        job: What to launch.
        name: Name of the run.
        env: On top of the job's ``envs``.
        secret: On top of its ``secrets``.
        inject: Faults to rehearse.
        hosts: Rehearse that many hosts on this machine.
        head: Where the head is, in place of the job's own word.
        address: Where hosts dial a head that is here; by default loopback for a rehearsal, else that of the default
            route.
        spare: Hosts kept ready for those that are lost; by default as many as the job says.
        is_dry: It will not be launched: what this machine lacks for a run of its own is not refused.

    Raises:
        ConfigError: The job, an override or an injection cannot be used, or this version does not launch there, or
            this machine lacks what that needs.
    """
    spec = headed(_prepared(job, name=name, env=env, secret=secret, spare=spare), head)
    if spec.places() == ("local",) and hosts is None:
        review(spec).require()
        if address is not None:
            raise ConfigError("--head-address: nobody dials the head of a run of this machine alone")
        plan = _plan_here(spec, inject)
        if not is_dry:
            require_all(spec)
        return plan
    if hosts is None:
        found = review(spec)
        found.require()
        chosen = cast("Launchable", found.chosen)  # refused otherwise
    else:
        chosen = rehearsal(spec, hosts)
    plan = _plan_here(spec, inject, host=HEAD)
    dialled: str | None = None
    if chosen.choices[0].head.kind == "here":
        dialled = LOOPBACK if hosts is not None and address is None else head_address(address)
    elif address is not None:
        raise ConfigError(
            f"--head-address: the head is the cluster {chosen.choices[0].head.cluster}, which knows its own address",
            hint="leave it out, or write head: here",
        )
    shipment = None
    if hosts is None:
        require_all(spec)
        shipment = shipment_of(spec)
        require_runnable(spec, here=None, shipped=frozenset(shipment.workdir.files))
    authority, identities = _certificates(plan.run_id, tunnelled=is_tunnelled(chosen.choices[0]))
    return plan_remote(
        plan, chosen, address=dialled, authority=authority, identities=identities, shipment=shipment
    )


def headed(spec: JobSpec, head: str | None) -> JobSpec:
    """The job with its head somewhere else.

    Raises:
        ConfigError: That is no place for one.
    """
    if head is None:
        return spec
    from pydantic import TypeAdapter, ValidationError

    from sky_monarch.config.fields import Head

    try:
        place = TypeAdapter(Head).validate_python(head)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"--head {head}: {message}", hint="here, cluster or api-server") from None
    return spec.model_copy(update={"head": place})


def _certificates(run_id: str, *, tunnelled: bool) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The run's own authority, and what it has issued to the head's processes."""
    local.require_core()
    from sky_monarch.actors.authority import Authority

    authority = Authority.create(run_id, _LIFETIME_S)
    names = {"agent": HEAD, "controller": "controller", "lighthouse": "lighthouse"}
    if tunnelled:
        names["relay"] = "relay"
    return authority.to_json(), {who: authority.issue(name) for who, name in names.items()}


def launch_job(job: Job, *, timeout_s: float, **options: Any) -> Run:
    """Plan and launch; or, where a run of this very job was lost, take that one up again.

    Args:
        job: What to launch.
        timeout_s: Longest wait for the controller to answer.
        **options: Those of :func:`plan_run`.

    Returns:
        The run; ``resumed`` says which of the two it is.

    Raises:
        ConfigError: The job cannot be used; nothing was started.
        RunExistsError: A live run has its name.
        LaunchError: It did not come up; what had started was ended.
    """
    return launch_plan(plan_run(job, **options), timeout_s=timeout_s)


def launch_plan(planned: LocalPlan | RemotePlan, *, timeout_s: float) -> Run:
    """Launch what was planned; see :func:`launch_job`."""
    plan = planned.head if isinstance(planned, RemotePlan) else planned
    if isinstance(planned, RemotePlan) and planned.provider == "skypilot":
        from sky_monarch.launch import skypilot

        skypilot.ensure_server()  # no process of the run starts one: it would end with the run
    if (lost := _lost(plan)) is not None and lost.resume(timeout_s=timeout_s):
        return lost
    shipment = planned.shipment if isinstance(planned, RemotePlan) else None
    run = Run(RunFolder(plan.run_dir))
    local.launch(
        plan,
        ready=lambda _: run.answers(),
        deadline_s=timeout_s,
        prepare=None if shipment is None else shipment.stage,
        undo=away.undo if isinstance(planned, RemotePlan) and planned.address is None else None,
    )
    return run


def _lost(plan: LocalPlan) -> Run | None:
    """The newest run of that name, where it was lost and is of the same job."""
    named = [folder for folder in list_runs(plan.state) if folder.name == plan.name]
    if not named or not named[-1].resumable:
        return None
    folder = named[-1]
    waits = (
        folder.head is not None and folder.phase() is Phase.LIVE and folder.agent() is None
    )  # for its launcher
    if folder.phase() is not Phase.LOST and not waits:
        return None
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
