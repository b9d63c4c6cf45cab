"""A run over several hosts that are all this machine: one agent a host, all of them real, all on loopback.

Launched as a local run is, but the head's agent has no groups, and every other host has one. Those of
:func:`several_hosts` dial unix sockets; those of :func:`enrolled_hosts` know only what a provisioned host is told: they
enrol, and dial the head over TLS.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import sky_monarch
from sky_monarch.actors import Authority
from sky_monarch.launch import local
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.head import with_relay
from sky_monarch.launch.tunnel import tunnel_address
from sky_monarch.sdk._up import plan_job
from sky_monarch.sdk.run import Run
from tests.support.network import Network
from tests.support.runs import Workbench, quiet_sockets


def _files(plan: local.LocalPlan, count: int, limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The plan's files for a head without groups and a host for each group."""
    files = {name: dict(content) for name, content in plan.files.items()}
    head = files["agent.json"]
    for number in range(count):
        files[f"agent-{number}.json"] = {
            **head,
            "host": f"host{number}",
            "socket": str(plan.socket_dir / f"agent-{number}.sock"),
            "services": [],
        }
    files["agent.json"] = {**head, "host": "head"}
    placed = [{"name": "head", "groups": []}]
    placed += [{"name": f"host{number}", "groups": [number]} for number in range(count)]
    files["controller.json"] = {**files["controller.json"], "hosts": placed, "limits": dict(limits)}
    return files


@contextmanager
def several_hosts(
    bench: Workbench,
    job: Path,
    *,
    count: int,
    missing: Collection[int] = (),
    limits: Mapping[str, float] | None = None,
) -> Iterator[tuple[str, dict[int, subprocess.Popen[bytes]]]]:
    """Run ``job``, one group on each of ``count`` hosts; yields its name and the keepers of the hosts' agents.

    Args:
        bench: Of the test.
        job: The job file.
        count: Hosts, and replica groups.
        missing: Hosts whose agent never starts.
        limits: Of the controller.
    """
    with mock.patch.dict("os.environ", bench.env), quiet_sockets():
        plan = plan_job(job)
        plan = dataclasses.replace(plan, files=_files(plan, count, limits or {}))
        with Run(RunFolder(plan.run_dir)) as probe:
            local.launch(plan, ready=lambda _: probe.answers())
        environment = agent_environment(plan.run_id)
    bench.names.append(plan.name)
    keepers = {}
    with ExitStack() as undo:
        for number in set(range(count)) - set(missing):
            log = undo.enter_context((plan.run_dir / f"agent-{number}.log").open("ab"))
            keepers[number] = subprocess.Popen(
                [sys.executable, "-m", "sky_monarch.agent", str(plan.run_dir / f"agent-{number}.json")],
                cwd=plan.run_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            undo.callback(keepers[number].wait, timeout=30)
        undo.callback(bench.cli, "down", plan.name, "--grace", "2")
        yield plan.name, keepers


_ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A run whose hosts have enrolled.

    Attributes:
        name: Of the run.
        run_id: Its id.
        run_dir: The head's folder.
        controller: Where hosts dial it, ``tls:<host>:<port>``.
        authority: Issues certificates of the run.
        hosts: Their folders, by name.
        keepers: Of their agents, by name.
    """

    name: str
    run_id: str
    run_dir: Path
    controller: str
    authority: Authority
    hosts: dict[str, Path]
    keepers: dict[str, subprocess.Popen[bytes]]

    @property
    def ports(self) -> dict[str, list[int]]:
        """The ports of the head's services, as the head remembers them."""
        files = self.run_dir.glob("*.ports")
        return {file.stem: json.loads(file.read_text()) for file in files}


def _head_files(
    plan: local.LocalPlan,
    names: list[str],
    authority: Authority,
    limits: Mapping[str, float],
    address: str,
    tunnelled: bool,
) -> dict[str, dict[str, Any]]:
    """The plan's files for a head that hosts reach over TLS, at ``address``."""
    files = {name: dict(content) for name, content in plan.files.items()}
    port = f"{address}:0"
    listens = {"lighthouse": [port, port], "controller": port}
    services = [
        {**service, "listen": listens[service["name"]]} for service in files["agent.json"]["services"]
    ]
    files["agent.json"] |= {"host": "head", "services": services}
    certificates = {"agent": "head", "controller": "controller", "lighthouse": "lighthouse"}
    files["private.json"] |= {
        "authority": authority.to_json(),
        "identities": {who: authority.issue(name) for who, name in certificates.items()},
    }
    control = f"unix:{files['lighthouse.json']['sockets']['lighthouse']}"
    files["lighthouse.json"] |= {"tls": True, "control": [control, f"tls:{port}"]}
    placed = [{"name": "head", "groups": []}]
    placed += [{"name": name, "groups": [number]} for number, name in enumerate(names)]
    files["controller.json"] |= {"hosts": placed, "limits": dict(limits), "tls": True}
    if tunnelled:
        files["private.json"]["identities"]["relay"] = authority.issue("relay")
        files |= with_relay(plan, files, address)
    return files


def enrolment(
    enrolled: Enrolled,
    host: str,
    *,
    attempt: int = 1,
    version: str = sky_monarch.__version__,
    limits: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """What an agent's environment holds that is to be that host."""
    told = {
        "version": version,
        "run_id": enrolled.run_id,
        "host": host,
        "attempt": attempt,
        "controller": enrolled.controller,
        "address": "auto",
        "inherit_env": True,
        "linger_s": 30.0,
        "limits": dict(limits or {}),
    }
    if ports := enrolled.ports.get("relay"):
        head = enrolled.controller.rpartition(":")[0]
        told |= {"relay": f"{head}:{ports[0]}", "address": tunnel_address(host)}
    token = json.loads((enrolled.run_dir / "private.json").read_text())["token"]
    identity = enrolled.authority.issue(f"{host}-a{attempt}")
    secret = json.dumps({"token": token, "identities": {"agent": identity}}).encode()
    return {
        "SKY_MONARCH_HOST": json.dumps(told),
        "SKY_MONARCH_ENROLMENT": base64.b64encode(secret).decode(),
    }


def enrol(
    enrolled: Enrolled,
    host: str,
    folder: Path,
    variables: Mapping[str, str],
    *,
    inside: Callable[..., list[str]] = lambda *argv: list(argv),
) -> subprocess.Popen[bytes]:
    """Start an agent as SkyPilot's task, or the local provider, does; ``inside`` puts its command elsewhere."""
    environment = agent_environment(enrolled.run_id)
    with (enrolled.run_dir / f"{host}.log").open("ab") as log:
        return subprocess.Popen(
            inside(sys.executable, "-m", "sky_monarch.agent", "--enrol", str(folder)),
            cwd=enrolled.run_dir,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@contextmanager
def enrolled_hosts(
    bench: Workbench,
    job: Path,
    *,
    count: int,
    limits: Mapping[str, float] | None = None,
    agent_limits: Mapping[str, float] | None = None,
    net: Network | None = None,
    tunnelled: bool = False,
) -> Iterator[Enrolled]:
    """Run ``job``, one group on each of ``count`` hosts that were provisioned for the first time.

    Args:
        bench: Of the test.
        job: The job file.
        count: Hosts, and replica groups.
        limits: Of the controller.
        agent_limits: Of the hosts' agents.
        net: Its hub is the head, its hosts the hosts; None: all are on loopback.
        tunnelled: Hosts reach each other through the head alone. Each sees its own processes only: nobody reads another
            one's memory past the network.
    """
    address = net.hub_address if net else "127.0.0.1"
    with mock.patch.dict("os.environ", bench.env), quiet_sockets():
        plan = plan_job(job)
        names = [f"{plan.name}-h{number}" for number in range(count)]
        authority = Authority.create(plan.run_id, 3600)
        plan = dataclasses.replace(
            plan, files=_head_files(plan, names, authority, limits or {}, address, tunnelled)
        )
        if net:
            plan = dataclasses.replace(plan, agent_argv=net.inside(net.hub, *plan.agent_argv))
        with Run(RunFolder(plan.run_dir)) as probe:
            local.launch(plan, ready=lambda _: probe.answers())
        bench.names.append(plan.name)
        (port,) = json.loads((plan.run_dir / "controller.ports").read_text())
        folders = {name: bench.folder / f"{name}-a1" for name in names}
        far = Enrolled(plan.name, plan.run_id, plan.run_dir, f"tls:{address}:{port}", authority, folders, {})
        with ExitStack() as undo:
            for number, (name, folder) in enumerate(folders.items()):
                alone = _ALONE if tunnelled else ()
                inside = {"inside": partial(net.inside, net.hosts[number], *alone)} if net else {}
                told = enrolment(far, name, limits=agent_limits)
                far.keepers[name] = enrol(far, name, folder, told, **inside)
                undo.callback(far.keepers[name].wait, timeout=30)
            undo.callback(bench.cli, "down", plan.name, "--grace", "2")
            yield far
