"""Train on AMD Instinct GPUs that crash and get pre-empted, and lose almost nothing.

```python
import sky_monarch as sm

run = sm.up("job.yaml")
for event in run.events(follow=True):
    ...
run.wait().check()
```

Every name is imported when it is first used, so that ``import sky_monarch`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec as JobSpec
    from sky_monarch.config import Problem as Problem
    from sky_monarch.errors import ConfigError as ConfigError
    from sky_monarch.errors import LaunchError as LaunchError
    from sky_monarch.errors import RunExistsError as RunExistsError
    from sky_monarch.errors import RunFailedError as RunFailedError
    from sky_monarch.errors import RunNotFoundError as RunNotFoundError
    from sky_monarch.errors import SkyMonarchError as SkyMonarchError
    from sky_monarch.sdk import Event as Event
    from sky_monarch.sdk import ExitStatus as ExitStatus
    from sky_monarch.sdk import GroupStatus as GroupStatus
    from sky_monarch.sdk import LogLine as LogLine
    from sky_monarch.sdk import RankStatus as RankStatus
    from sky_monarch.sdk import RecoveryRecord as RecoveryRecord
    from sky_monarch.sdk import Run as Run
    from sky_monarch.sdk import RunStatus as RunStatus
    from sky_monarch.sdk import Scaled as Scaled
    from sky_monarch.sdk import aio as aio
    from sky_monarch.sdk import attach as attach
    from sky_monarch.sdk import down as down
    from sky_monarch.sdk import events as events
    from sky_monarch.sdk import logs as logs
    from sky_monarch.sdk import plan as plan
    from sky_monarch.sdk import runs as runs
    from sky_monarch.sdk import scale as scale
    from sky_monarch.sdk import status as status
    from sky_monarch.sdk import up as up
    from sky_monarch.sdk import validate as validate
    from sky_monarch.sdk.actor_hosts import launch_hosts as launch_hosts
    from sky_monarch.sdk.aio import AsyncRun as AsyncRun

_HOMES = {
    "AsyncRun": "sky_monarch.sdk.aio",
    "ConfigError": "sky_monarch.errors",
    "Event": "sky_monarch.sdk",
    "ExitStatus": "sky_monarch.sdk",
    "GroupStatus": "sky_monarch.sdk",
    "JobSpec": "sky_monarch.config",
    "LaunchError": "sky_monarch.errors",
    "LogLine": "sky_monarch.sdk",
    "Problem": "sky_monarch.config",
    "RankStatus": "sky_monarch.sdk",
    "RecoveryRecord": "sky_monarch.sdk",
    "Run": "sky_monarch.sdk",
    "RunExistsError": "sky_monarch.errors",
    "RunFailedError": "sky_monarch.errors",
    "RunNotFoundError": "sky_monarch.errors",
    "RunStatus": "sky_monarch.sdk",
    "Scaled": "sky_monarch.sdk",
    "SkyMonarchError": "sky_monarch.errors",
    "aio": "sky_monarch.sdk",
    "attach": "sky_monarch.sdk",
    "down": "sky_monarch.sdk",
    "events": "sky_monarch.sdk",
    "launch_hosts": "sky_monarch.sdk.actor_hosts",
    "logs": "sky_monarch.sdk",
    "plan": "sky_monarch.sdk",
    "runs": "sky_monarch.sdk",
    "scale": "sky_monarch.sdk",
    "status": "sky_monarch.sdk",
    "up": "sky_monarch.sdk",
    "validate": "sky_monarch.sdk",
}

__all__ = [
    "AsyncRun",
    "ConfigError",
    "Event",
    "ExitStatus",
    "GroupStatus",
    "JobSpec",
    "LaunchError",
    "LogLine",
    "Problem",
    "RankStatus",
    "RecoveryRecord",
    "Run",
    "RunExistsError",
    "RunFailedError",
    "RunNotFoundError",
    "RunStatus",
    "Scaled",
    "SkyMonarchError",
    "aio",
    "attach",
    "down",
    "events",
    "launch_hosts",
    "logs",
    "plan",
    "runs",
    "scale",
    "status",
    "up",
    "validate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(home)
    value = importlib.import_module("sky_monarch.sdk.aio") if name == "aio" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
