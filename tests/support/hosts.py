"""A run over several hosts that are all this machine: one agent a host, all of them real, all on loopback.

Launched as a local run is, but the head's agent has no groups, and every other host has one.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sky_monarch.launch import local
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import RunFolder
from sky_monarch.sdk._up import plan_job
from sky_monarch.sdk.run import Run
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
