"""Hosts for actors, launched as a job: what starts, replaces and takes them down is what does so for training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sky_monarch.actors.attach import HostListener
    from sky_monarch.actors.host_mesh import HostMesh
    from sky_monarch.sdk.run import Run

__all__ = ["launch_hosts"]

_LOOK_S = 2.0
_ENDED = {"SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED", "LOST"}


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
) -> HostMesh:
    """Launch so many hosts and attach to them: on Slurm, Kubernetes, a cloud, or here.

    They are a job of that name, which ``sky-monarch status``, ``logs`` and ``down`` know. It ends by itself with this
    program, however that ends, and its hosts are taken down then. The hosts dial this program: it has to run where they
    reach it.

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

    Raises:
        ConfigError: Something cannot be used; nothing was started.
        LaunchError: The hosts did not all come; what had started was taken down.
    """
    from sky_monarch.actors.attach import HostListener
    from sky_monarch.actors.keys import KEYS_ENV, ActorKeys
    from sky_monarch.config import JobSpec
    from sky_monarch.launch.address import LOOPBACK, head_address
    from sky_monarch.sdk import up

    if count < 1:
        raise ConfigError(f"{count} hosts", hint="1 or more")
    if listen is None:
        address = LOOPBACK if infra == "local" else head_address(None)
        listen = f"[{address}]:0" if ":" in address else f"{address}:0"
    # One certificate for all of them: a job has the same secrets for each of its groups.
    client, (host,) = ActorKeys.create(1)
    python = sys.executable if infra == "local" else "python"
    spec: dict[str, Any] = {
        "name": name,
        "replicas": count,
        "infra": infra,
        "resources": dict(resources or {}),
        "workdir": str(Path(workdir).resolve()),
        "setup": setup,
        "recovery": {"standby": 0, "startup_limit_s": "off", "progress_limit_s": "off"},
        "secrets": {KEYS_ENV: host.to_text()},
    }
    JobSpec.model_validate({**spec, "run": "true"})  # before anything listens
    door = HostListener(listen, keys=client)
    serve = f"exec {python} -m sky_monarch.actor_host --dial {door.address} --within {timeout:g}"
    run = up(JobSpec.model_validate({**spec, "run": f'{serve} --name "{name}-$SKY_MONARCH_REPLICA"'}))
    try:
        return _hosts(door, run, count, time.monotonic() + timeout)
    except BaseException:
        run.down(reason="its hosts did not come")
        raise
    finally:
        run.close()


def _hosts(door: HostListener, run: Run, count: int, end: float) -> HostMesh:
    while True:
        left = end - time.monotonic()
        try:
            return door.hosts(count, timeout=max(0.1, min(left, _LOOK_S)))
        except LaunchError:
            status = run.status()
            if status.state in _ENDED:
                raise LaunchError(
                    f"{run.name} has ended ({status.state}: {status.reason}) before its hosts were there",
                    hint=f"sky-monarch logs {run.run_id}",
                ) from None
            if left <= 0:
                raise
