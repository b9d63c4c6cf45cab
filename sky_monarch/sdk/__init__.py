"""The SDK: launch runs, watch them, end them. Its only counterpart is the controller's HTTP API.

Every function takes the name or the id of a run; :class:`Run` has the same as methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.launch.folder import Phase, RunFolder, find, list_runs
from sky_monarch.sdk.run import Run
from sky_monarch.sdk.scaling import Scaled
from sky_monarch.sdk.types import (
    TERMINAL_STATES,
    Event,
    ExitStatus,
    FindingStatus,
    GroupStatus,
    HostStatus,
    LighthouseStatus,
    LogLine,
    OutputStatus,
    QuorumStatus,
    RankStatus,
    RecoveryRecord,
    RunStatus,
    SetupStatus,
)

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec
    from sky_monarch.errors import ChannelError
    from sky_monarch.launch.cluster_plan import ClusterPlan
    from sky_monarch.sdk._up import Job as Job
    from sky_monarch.sdk.bundle import Bundle

__all__ = [
    "TERMINAL_STATES",
    "Event",
    "ExitStatus",
    "FindingStatus",
    "GroupStatus",
    "HostStatus",
    "Job",
    "LighthouseStatus",
    "LogLine",
    "OutputStatus",
    "QuorumStatus",
    "RankStatus",
    "RecoveryRecord",
    "Run",
    "RunStatus",
    "Scaled",
    "SetupStatus",
    "attach",
    "debug_bundle",
    "down",
    "events",
    "glance",
    "logs",
    "plan",
    "runs",
    "scale",
    "status",
    "up",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sky_monarch.sdk import _up

    return _up.Job


def validate(path: str | Path) -> JobSpec:
    """Read and check a job file; start nothing.

    Raises:
        ConfigError: It cannot be used. As ``JobFileError`` it has all ``problems`` at once.
    """
    from sky_monarch.config import load_job

    return load_job(Path(path))


def plan(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
) -> ClusterPlan:
    """Plan a job: hosts, groups, price and SkyPilot tasks of each candidate. Asks nobody, starts nothing.

    Args:
        job: Path of a job file, or a ``JobSpec``.
        name: Name of the run; by default the job's.
        env: Variables on top of the job's ``envs``; None as a value takes the caller's own.
        secret: The same for ``secrets``.

    Raises:
        ConfigError: The job cannot be used, or can be nowhere that it names; every reason is in it.
    """
    from sky_monarch.sdk import _up  # planning costs more to import than all the rest

    return _up.review_job(job, name=name, env=env, secret=secret).plan


def up(
    job: Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
    inject: Iterable[str] = (),
    hosts: int | None = None,
    head: str | None = None,
    head_address: str | None = None,
    spare: int | None = None,
    detach: bool = True,
    timeout_s: float = 60.0,
) -> Run:
    """Launch a job, and return once its controller answers. Its hosts, where it has some, are then on their way.

    Nobody is asked: :func:`plan` says beforehand where it would run, and what that costs.

    Where the newest run of that name is of the same job and was lost (its agent and the agent's keeper were
    killed), that one is taken up again under its id: ``Run.resumed`` says so.

    Args:
        job: Path of a job file, or a ``JobSpec``.
        name: Name of the run; by default the job's.
        env: Variables on top of the job's ``envs``; None as a value takes the caller's own.
        secret: The same for ``secrets``.
        inject: Faults to rehearse, such as ``kill:replica=1,rank=0,step=30``.
        hosts: Rehearse so many hosts: each is an agent of this machine.
        head: ``here``, ``cluster`` or ``api-server``, in place of the job's.
        head_address: Address of this machine that hosts dial; None: that of its route to others.
        spare: Hosts kept ready for those that are lost; None: as many as the job says.
        detach: Return at once; with False wait for the end, which must be a success. Where the waiting is
            interrupted, the run goes on.
        timeout_s: Longest wait for the controller to answer.

    Raises:
        ConfigError: The job cannot be used; nothing was started.
        RunExistsError: A live run has its name.
        LaunchError: It did not come up; what had started was ended. Or SkyPilot is not installed.
        RunFailedError: With ``detach=False``: it ended badly (as do SetupError and SupervisionError).
    """
    from sky_monarch.sdk import _up

    options = {"name": name, "env": env, "secret": secret, "inject": inject, "head": head, "spare": spare}
    run = _up.launch_job(job, timeout_s=timeout_s, hosts=hosts, address=head_address, **options)
    if not detach:
        run.wait().check()
    return run


def attach(name_or_id: str) -> Run:
    """The run of this id, else the live run of this name, else its newest ended one.

    Raises:
        RunNotFoundError: There is none.
    """
    return Run(find(name_or_id))


def status(name_or_id: str) -> RunStatus:
    """What a run is doing now, or how it ended.

    Raises:
        RunNotFoundError: There is none.
        ChannelTimeoutError: The controller did not answer in time.
    """
    with attach(name_or_id) as run:
        return run.status()


def glance(name_or_id: str) -> tuple[RunStatus, ChannelError | None]:
    """What a run is doing, within a few seconds, and why its controller cannot say it; see :meth:`Run.glance`.

    Raises:
        RunNotFoundError: There is none.
    """
    with attach(name_or_id) as run:
        return run.glance()


def runs(*, ended: bool = False) -> tuple[RunStatus, ...]:
    """Status of the runs of this machine, oldest first. One whose controller is silent says so in ``reason``.

    Args:
        ended: Those that have ended as well.
    """
    return tuple(_brief(folder) for folder in list_runs() if ended or folder.phase() is not Phase.ENDED)


def _brief(folder: RunFolder) -> RunStatus:
    if folder.phase() is Phase.ENDED and folder.token is not None and folder.agent() is None:
        folder.settle()  # nobody was attached when it ended
    with Run(folder) as run:
        return run.glance(patience_s=2.0)[0]


def events(name_or_id: str, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
    """What happened in a run, oldest first; see :meth:`Run.events`.

    Raises:
        RunNotFoundError: There is none.
    """
    with attach(name_or_id) as run:
        yield from run.events(after=after, follow=follow)


def logs(
    name_or_id: str,
    *,
    replica: int | None = None,
    rank: int | None = None,
    generation: int | None = None,
    setup: bool = False,
    tail: int | None = None,
    follow: bool = False,
) -> Iterator[LogLine]:
    """Captured output of a run, line by line; see :meth:`Run.logs`.

    Raises:
        RunNotFoundError: There is none.
    """
    with attach(name_or_id) as run:
        yield from run.logs(
            replica=replica, rank=rank, generation=generation, setup=setup, tail=tail, follow=follow
        )


def down(name_or_id: str, *, grace_s: float = 10.0, reason: str = "down", purge: bool = False) -> RunStatus:
    """End a run in order, its hosts too; where nobody is left to do so, from outside. Safe to repeat.

    Args:
        name_or_id: The run.
        grace_s: Seconds between TERM and KILL.
        reason: Shown in the events.
        purge: Forget its hosts, and do not wait for them: see :meth:`Run.down`.

    Raises:
        RunNotFoundError: There is none.
        SystemCallError: Some process could not be ended.
    """
    with attach(name_or_id) as run:
        return run.down(grace_s=grace_s, reason=reason, purge=purge)


def scale(name_or_id: str, replicas: int, *, dry_run: bool = False, reason: str = "scale") -> Scaled:
    """Have another number of replica groups in a run that goes on; see :meth:`Run.scale`.

    Args:
        name_or_id: The run.
        replicas: How many: those with the lowest numbers.
        dry_run: Say what would change, and change nothing.
        reason: Shown in the events.

    Raises:
        RunNotFoundError: There is no such run.
        ConfigError: It cannot be: too few, no room for so many, or the run is ending. Nothing was changed.
        ChannelTimeoutError: The controller did not answer in time. It may have heard.
    """
    with attach(name_or_id) as run:
        return run.scale(replicas, dry_run=dry_run, reason=reason)


def debug_bundle(name_or_id: str | None = None, target: Path | None = None) -> Bundle:
    """Write what is known of a run, without its secrets, into one new file for whoever is to look at it.

    Args:
        name_or_id: The run; None: the newest that is live, else the newest.
        target: The file; None: one in the current folder.

    Raises:
        RunNotFoundError: There is no such run.
        ConfigError: The target exists, or its folder does not.
    """
    from sky_monarch.sdk import bundle

    folder = bundle.newest() if name_or_id is None else find(name_or_id)
    return bundle.write_bundle(folder, target)
