"""One call of SkyPilot's SDK as a process: ``python -m tests.e2e.sky_call launch``, arguments as JSON on stdin.

Prints ``SAID {"value", "began_s", "wall_s"}`` at the end; SkyPilot was imported before it began.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import sky
from sky.utils.common import StatusRefreshMode


def launch(cluster: str, task: dict[str, Any]) -> Any:
    """``sky launch --detach-run``: returns the id of the job."""
    job, _ = sky.get(sky.launch(sky.Task.from_yaml_config(task), cluster_name=cluster))
    return job


def status(refresh: bool = True) -> Any:
    """``sky status``: names of the clusters, and what they are said to be."""
    mode = StatusRefreshMode.FORCE if refresh else StatusRefreshMode.NONE
    found = sky.get(sky.status(refresh=mode))
    return {record["name"]: record["status"].value for record in found}


def logs(cluster: str, job: int | None = None) -> Any:
    """``sky logs --no-follow``: what a job has printed."""
    text = io.StringIO()
    code = sky.tail_logs(cluster, job, follow=False, output_stream=text)
    return {"text": text.getvalue(), "code": code}


def down(cluster: str) -> Any:
    """``sky down``."""
    return sky.get(sky.down(cluster))


CALLS: dict[str, Callable[..., Any]] = {"launch": launch, "status": status, "logs": logs, "down": down}


def main() -> None:
    """Do what the command line names."""
    arguments = json.load(sys.stdin)
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    value = CALLS[sys.argv[1]](**arguments)
    wall_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    print(f"\nSAID {json.dumps({'value': value, 'began_s': began_s, 'wall_s': wall_s})}")


if __name__ == "__main__":
    main()
