"""A run over several hosts, which are namespaces of this machine: one agent a host, all of them real.

Launched as a local run is, but the head's agent has no groups, and every other host has one. Agents,
controller and lighthouse talk over unix sockets, which no cut link concerns; ranks talk over the network.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sky_monarch import _core
from sky_monarch.launch import local
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import RunFolder
from sky_monarch.sdk._up import plan_job
from sky_monarch.sdk.run import Run
from tests.support.network import Network
from tests.support.runs import Workbench

_HEAD = "head"


def _host(number: int) -> str:
    return f"host{number}"


def _agent_files(plan: local.LocalPlan, net: Network) -> dict[str, dict[str, Any]]:
    """The plan's files for a head without groups and a host for each group."""
    files = {name: dict(content) for name, content in plan.files.items()}
    head = files["agent.json"]
    hosts = range(len(net.hosts))
    services = [dict(service) for service in head["services"]]
    for service in services:
        if service["listen"]:
            service["listen"] = f"{net.hub_address}:0"
    for number in hosts:
        files[f"agent-{number}.json"] = {
            **head,
            "host": _host(number),
            "socket": str(plan.socket_dir / f"agent-{number}.sock"),
            "services": [],
            "address": net.addresses[number],
        }
    files["agent.json"] = {**head, "host": _HEAD, "services": services}
    # Beyond one machine lighthouse and agents show each other certificates of the run.
    identities = _core.issue_identities(plan.run_id, ["lighthouse", "agent"], 3600.0)
    files["private.json"]["identities"] = json.loads(identities)
    placed = [{"name": _HEAD, "groups": []}]
    placed += [{"name": _host(number), "groups": [number]} for number in hosts]
    files["controller.json"] = {**files["controller.json"], "hosts": placed}
    return files


@contextmanager
def cluster(bench: Workbench, job: Path, net: Network) -> Iterator[str]:
    """Run ``job``, one group on each host of ``net``, for the length of the block; yields its name."""
    with mock.patch.dict("os.environ", bench.env):
        plan = plan_job(job)
        plan = dataclasses.replace(
            plan,
            files=_agent_files(plan, net),
            agent_argv=net.inside(net.hub, *plan.agent_argv),
        )
        with Run(RunFolder(plan.run_dir)) as probe:
            local.launch(plan, ready=lambda _: probe.answers())
        environment = agent_environment(plan.run_id)
    bench.names.append(plan.name)
    with ExitStack() as undo:
        for number, name in enumerate(net.hosts):
            config = str(plan.run_dir / f"agent-{number}.json")
            log = undo.enter_context((plan.run_dir / f"agent-{number}.log").open("ab"))
            agent = subprocess.Popen(
                net.inside(name, sys.executable, "-m", "sky_monarch.agent", config),
                cwd=plan.run_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            undo.callback(agent.wait, timeout=30)
        undo.callback(bench.cli, "down", plan.name, "--grace", "2")
        yield plan.name
