"""Hosts for actors, launched as a job: what starts, replaces and takes them down is what does so for training."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError, LaunchError, SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sky_monarch.actors.attach import HostListener
    from sky_monarch.actors.host_mesh import HostMesh
    from sky_monarch.config import JobSpec
    from sky_monarch.sdk.run import Run
    from sky_monarch.sdk.types import RunStatus

__all__ = ["hosts_job", "launch_hosts"]

_LOOK_S = 2.0
#: A host dials the program for so long: then it is started again, a few times.
_DIAL_S = 300.0
_RESTARTS = 3
#: The job ends by itself when its hosts are let go; past this it is told to.
_BY_ITSELF_S = 20.0
#: Hosts get our wheel without what it needs: an agent needs none of it, and actors of a program's own script need this.
_NEEDED = (
    "python -c 'import cloudpickle' 2>/dev/null || "
    "python -m pip install --quiet --disable-pip-version-check 'cloudpickle>=3'"
)
#: What a job of hosts decides itself.
_MOST_GPUS = 8  # of a host, as a job file may say
_OURS = (
    "name",
    "replicas",
    "ranks_per_replica",
    "infra",
    "resources",
    "workdir",
    "setup",
    "run",
    "secrets",
    "sync",
)


def launch_hosts(
    count: int,
    *,
    name: str = "actors",
    infra: str = "local",
    resources: Mapping[str, Any] | None = None,
    workdir: str = ".",
    setup: str = "",
    listen: str | None = None,
    timeout: float = 1800.0,
    fields: Mapping[str, Any] | None = None,
) -> HostMesh:
    """Launch so many hosts and attach to them: on Slurm, Kubernetes, a cloud, or here.

    They are a job of that name, which ``sky-monarch status``, ``logs`` and ``down`` know. It ends by itself with this
    program, however that ends, and its hosts are taken down then; ``with launch_hosts(…) as hosts`` takes them down and
    waits for that, and says what they have cost. A host that is lost is had again: ``mesh.respawn(rank)`` starts the
    rank there. The hosts dial this program: it has to run where they reach it.

    Args:
        count: Hosts.
        name: Of the job.
        infra: As in a job file.
        resources: As in a job file, of one host: ``{"accelerators": "MI300X:8"}``.
        workdir: What the hosts get of this machine's files.
        setup: Shell text that prepares a host.
        listen: ``host:port`` of this machine that the hosts reach; by default the address of its route to others, and
            a port that the system chooses.
        timeout: Seconds, until all hosts are there.
        fields: Others of a job file: ``{"budget": {"max_usd": 20}, "envs": {…}}``.

    Raises:
        ConfigError: Something cannot be used; nothing was started.
        LaunchError: The hosts did not all come; what had started was taken down.
    """
    from sky_monarch.actors.attach import HostListener
    from sky_monarch.actors.keys import ActorKeys
    from sky_monarch.launch.address import LOOPBACK, head_address
    from sky_monarch.sdk import up

    given: dict[str, Any] = {
        "name": name,
        "infra": infra,
        "resources": dict(resources or {}),
        "workdir": str(Path(workdir).resolve()),
        "setup": setup,
        **_checked(fields or {}),
    }
    # One certificate for all of them: a job has the same secrets for each of its groups.
    client, (host,) = ActorKeys.create(1)
    local = infra == "local"
    python = sys.executable if local else "python"
    # Before anything listens.
    hosts_job(count, given, keys=host.to_text(), python=python, dial="host:1")
    if listen is None:
        address = LOOPBACK if local else head_address(None)
        listen = f"[{address}]:0" if ":" in address else f"{address}:0"
    door = HostListener(listen, keys=client)
    job = hosts_job(count, given, keys=host.to_text(), python=python, dial=door.address)
    where = door.address.rpartition(":")[0].strip("[]")
    run = up(job, head_address=None if local or job.head == "cluster" else where)
    launched = _Launched(run)
    try:
        _say(
            f"{run.name} brings up {count} host{'s' * (count > 1)} ({infra}); `sky-monarch status {run.name}`"
        )
        mesh = _hosts(door, run, count, time.monotonic() + timeout)
        door.launched(mesh, launched)
    except BaseException:
        run.down(reason="its hosts did not come")
        launched.end(0.0)
        raise
    return mesh


def hosts_job(count: int, given: Mapping[str, Any], *, keys: str, python: str, dial: str) -> JobSpec:
    """The job that hosts for actors are: each replica group is a host, whose only rank dials the program.

    Args:
        count: Hosts.
        given: Fields of the job that its user decides.
        keys: Of the hosts, which go as a secret. Secret.
        python: Interpreter there.
        dial: ``host:port`` of the program.

    Raises:
        ConfigError: Something cannot be used.
    """
    from sky_monarch.actors.keys import KEYS_ENV
    from sky_monarch.config import load_job

    if count < 1:
        raise ConfigError(f"{count} hosts", hint="1 or more")
    resources = dict(given.get("resources") or {})
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, str) and "gpus_per_host" not in resources:
        wanted = accelerators.rpartition(":")[2]
        if wanted.isdecimal() and 1 <= int(wanted) <= _MOST_GPUS:
            resources["gpus_per_host"] = int(wanted)  # a host each, also where larger ones cost less a GPU
    recovery = {
        "max_restarts": _RESTARTS,
        **(given.get("recovery") or {}),
        "standby": 0,
        "startup_limit_s": "off",
        "progress_limit_s": "off",
    }
    serve = f"exec {python} -m sky_monarch.actor_host --dial {dial} --within {_DIAL_S:g}"
    setup = str(given.get("setup") or "")
    document = {
        "head": "here",  # where the program is, which the hosts reach
        **given,
        "setup": setup if given.get("infra", "local") == "local" else f"{_NEEDED}\n{setup}",
        "replicas": count,
        "resources": resources,
        "recovery": recovery,
        # They average nothing: what their network is like is no matter, as long as they reach the program.
        "sync": "diloco(1)",
        "run": f'{serve} --name "{given["name"]}-$SKY_MONARCH_REPLICA"',
    }
    # As a file would say it, for its errors; the keys are in no text.
    return load_job(json.dumps(document, indent=1), secret_overrides={KEYS_ENV: keys})


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    taken = sorted(set(fields) & set(_OURS))
    if taken:
        raise ConfigError(
            f"fields has {', '.join(taken)}", hint="these are arguments of launch_hosts, or its own business"
        )
    return dict(fields)


def _say(words: str) -> None:
    sys.stderr.write(f"sky-monarch: {words}\n")
    sys.stderr.flush()


class _Launched:
    """The job behind the hosts of a program."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def end(self, timeout_s: float) -> None:
        """Wait until it has ended and its hosts are gone.

        Raises:
            LaunchError: Some may still bill.
        """
        run, end = self._run, time.monotonic() + timeout_s
        try:
            with contextlib.suppress(SkyMonarchError):
                run.wait(timeout_s=min(_BY_ITSELF_S, timeout_s))
            if not run.status().ended:
                run.down(reason="its program has let it go")
            status = run.wait(timeout_s=max(1.0, end - time.monotonic()))
            left = run.may_bill()
        finally:
            run.close()
        _say(f"{run.name} has ended{_cost(status)}")
        if left:
            raise LaunchError(
                f"of {run.name} these may still bill: {', '.join(left)}",
                hint=f"`sky-monarch down {run.name}` tries again",
            )


def _cost(status: RunStatus) -> str:
    if not status.hosts:
        return ""
    if status.cost_usd is None:
        return f": {len(status.hosts)} hosts are down; nobody has told what they cost"
    return f": {len(status.hosts)} hosts are down; they have cost ${status.cost_usd:.2f}"


def _hosts(door: HostListener, run: Run, count: int, end: float) -> HostMesh:
    while True:
        left = end - time.monotonic()
        try:
            return door.hosts(count, timeout=max(0.1, min(left, _LOOK_S)))
        except LaunchError:
            status = run.status()
            if status.ended:
                raise LaunchError(
                    f"{run.name} has ended ({status.state}: {status.reason}) before its hosts were there",
                    hint=f"sky-monarch logs {run.run_id}",
                ) from None
            if left <= 0:
                raise
