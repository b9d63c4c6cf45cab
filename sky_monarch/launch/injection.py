"""Faults to rehearse, as typed after ``--inject``."""

from __future__ import annotations

import difflib
from typing import Any

from sky_monarch.errors import ConfigError

__all__ = ["parse_injection"]

_FAULTS = ("kill", "hang", "exit", "oom")
_KEYS = ("replica", "rank", "step", "after")
_EXAMPLE = "for example kill:replica=1,rank=0,step=30 or hang:replica=0,after=5"


def _near(word: str, known: tuple[str, ...]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def parse_injection(text: str, *, number: int, replicas: int, ranks_per_replica: int) -> dict[str, Any]:
    """Read ``FAULT:replica=R[,rank=N](,step=S | ,after=SECONDS)`` into protocol values.

    Args:
        text: What was typed.
        number: Becomes the injection's id, unique in the run.
        replicas: Replica groups of the job.
        ranks_per_replica: Ranks of each of them.

    Raises:
        ConfigError: It does not read, or names a process that the job does not have.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"--inject {text}: {what}", hint=_EXAMPLE)

    fault, _, rest = text.partition(":")
    if fault not in _FAULTS:
        raise refuse(f"unknown fault {fault!r}{_near(fault, _FAULTS)}; known are {', '.join(_FAULTS)}")
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals:
            raise refuse(f"{part!r} is not {', '.join(f'{key}=…' for key in _KEYS)}{_near(key, _KEYS)}")
        if key in values:
            raise refuse(f"{key} is given twice")
        values[key] = value

    def count(key: str, below: int | None) -> int:
        value = values.get(key, "0")
        if not (value.isascii() and value.isdigit()):
            raise refuse(f"{key}={value} is not a whole number")
        if below is not None and int(value) >= below:
            raise refuse(f"{key}={value}, but the job has {key} 0 to {below - 1} only")
        return int(value)

    if ("step" in values) == ("after" in values):
        raise refuse("give one of step=N and after=SECONDS")
    if "replica" not in values:
        raise refuse("say which replica=N")
    trigger: dict[str, float]
    if "step" in values:
        trigger = {"step": count("step", None)}
    else:
        try:
            after_s = float(values["after"].removesuffix("s"))
        except ValueError:
            after_s = -1.0
        if not 0 <= after_s < float("inf"):
            raise refuse(f"after={values['after']} is not a number of seconds")
        trigger = {"after_s": after_s}
    slot = {"replica": count("replica", replicas), "rank": count("rank", ranks_per_replica)}
    return {"id": number, "slot": slot, "fault": fault, "trigger": trigger}
