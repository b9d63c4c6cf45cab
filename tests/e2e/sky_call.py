"""One call of SkyPilot's SDK as a process: ``python -m tests.e2e.sky_call launch``, arguments as JSON on stdin.

Prints ``SAID {"value", "wall_s", "cpu_s"}`` at the end.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def launch(cluster: str, task: dict[str, Any]) -> Any:
    """``sky launch --detach-run``: returns the id of the job."""
    import sky

    job, _ = sky.get(sky.launch(sky.Task.from_yaml_config(task), cluster_name=cluster))
    return job


def status(refresh: bool = True) -> Any:
    """``sky status``: names of the clusters, and what they are said to be."""
    import sky
    from sky.utils.common import StatusRefreshMode

    mode = StatusRefreshMode.FORCE if refresh else StatusRefreshMode.NONE
    found = sky.get(sky.status(refresh=mode))
    return {record["name"]: record["status"].value for record in found}


def logs(cluster: str, job: int | None = None) -> Any:
    """``sky logs --no-follow``: what a job has printed."""
    import io

    import sky

    text = io.StringIO()
    code = sky.tail_logs(cluster, job, follow=False, output_stream=text)
    return {"text": text.getvalue(), "code": code}


def down(cluster: str) -> Any:
    """``sky down``."""
    import sky

    return sky.get(sky.down(cluster))


CALLS: dict[str, Callable[..., Any]] = {"launch": launch, "status": status, "logs": logs, "down": down}


def main() -> None:
    """Do what the command line names."""
    started = time.monotonic()
    value = CALLS[sys.argv[1]](**json.load(sys.stdin))
    used = resource.getrusage(resource.RUSAGE_SELF)
    said = {
        "value": value,
        "wall_s": time.monotonic() - started,
        "cpu_s": used.ru_utime + used.ru_stime,
    }
    print(f"\nSAID {json.dumps(said)}")


if __name__ == "__main__":
    main()
