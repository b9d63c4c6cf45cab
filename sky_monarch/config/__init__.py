"""The job file: what it may say, how it is read, and what is wrong with it.

Importing this package costs nothing; pydantic and the YAML reader are loaded with the first name that needs
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sky_monarch.config.command import rank_command
    from sky_monarch.config.environment import parse_override, parse_overrides
    from sky_monarch.config.injection import Injection, parse_injection
    from sky_monarch.config.loading import Checked, check_job, load_job
    from sky_monarch.config.problem import JobFileError, Problem, problems_as_json
    from sky_monarch.config.reference import job_schema
    from sky_monarch.config.resources import Candidate, Resources
    from sky_monarch.config.spec import Budget, Checkpoint, JobSpec, Lighthouse, Logs, Recovery
    from sky_monarch.config.template import INIT_TEMPLATE

__all__ = [
    "INIT_TEMPLATE",
    "Budget",
    "Candidate",
    "Checked",
    "Checkpoint",
    "Injection",
    "JobFileError",
    "JobSpec",
    "Lighthouse",
    "Logs",
    "Problem",
    "Recovery",
    "Resources",
    "check_job",
    "job_schema",
    "load_job",
    "parse_injection",
    "parse_override",
    "parse_overrides",
    "problems_as_json",
    "rank_command",
]

_HOME = {
    "INIT_TEMPLATE": "template",
    "Budget": "budget",
    "Candidate": "resources",
    "Checked": "loading",
    "Checkpoint": "spec",
    "Injection": "injection",
    "JobFileError": "problem",
    "JobSpec": "spec",
    "Lighthouse": "spec",
    "Logs": "spec",
    "Problem": "problem",
    "Recovery": "spec",
    "Resources": "resources",
    "check_job": "loading",
    "job_schema": "reference",
    "load_job": "loading",
    "parse_injection": "injection",
    "parse_override": "environment",
    "parse_overrides": "environment",
    "problems_as_json": "problem",
    "rank_command": "command",
}


def __getattr__(name: str) -> Any:
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
