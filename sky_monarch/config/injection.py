"""Faults that a user rehearses: ``--inject kill:replica=1,rank=0,step=30``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sky_monarch.errors import ConfigError

__all__ = ["FORM", "Fault", "Injection", "parse_injection"]

Fault = Literal["kill", "hang", "exit", "oom"]

FORM = (
    "FAULT:replica=N,rank=N,step=N or FAULT:replica=N,rank=N,after=SECONDS, "
    "where FAULT is kill, hang, exit or oom"
)
"""The right form, for error messages and help."""

_FAULTS: tuple[str, ...] = get_args(Fault)
_KEYS = ("replica", "rank", "step", "after")
_LONGEST_S = 366 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault to rehearse, once in a run. Exactly one of ``step`` and ``after_s`` is set.

    Attributes:
        fault: ``kill`` (SIGKILL), ``hang`` (SIGSTOP), ``exit`` (code 1), ``oom`` (out of memory).
        replica: Replica group, from 0.
        rank: Rank inside the group, from 0.
        step: Fires when that rank has committed this step.
        after_s: Fires this long after the group's first generation started, in seconds.
    """

    fault: Fault
    replica: int
    rank: int = 0
    step: int | None = None
    after_s: float | None = None

    def __str__(self) -> str:
        """The text that :func:`parse_injection` reads back."""
        when = f"step={self.step}" if self.step is not None else f"after={self.after_s!r}"
        return f"{self.fault}:replica={self.replica},rank={self.rank},{when}"

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Injection:
        """What :meth:`to_wire` made."""
        slot, trigger = wire["slot"], wire["trigger"]
        return cls(
            fault=wire["fault"],
            replica=slot["replica"],
            rank=slot["rank"],
            step=trigger.get("step"),
            after_s=trigger.get("after_s"),
        )

    def check(self, *, replicas: int, ranks_per_replica: int) -> None:
        """Refuse a process that the job does not have.

        Raises:
            ConfigError: ``replica`` or ``rank`` is past the job's.
        """
        for what, index, count in (
            ("replica", self.replica, replicas),
            ("rank", self.rank, ranks_per_replica),
        ):
            if index >= count:
                only = "0 only" if count == 1 else f"0 to {count - 1}"
                raise ConfigError(f"--inject {self}: the job has {what} {only}", hint=f"the form is {FORM}")

    def to_wire(self, identifier: int) -> dict[str, Any]:
        """The injection as protocol.rs has it; ``identifier`` is unique in the run."""
        trigger = {"step": self.step} if self.step is not None else {"after_s": self.after_s}
        return {
            "id": identifier,
            "slot": {"replica": self.replica, "rank": self.rank},
            "fault": self.fault,
            "trigger": trigger,
        }


def parse_injection(
    text: str, *, replicas: int | None = None, ranks_per_replica: int | None = None
) -> Injection:
    """Read the argument of ``--inject``.

    Args:
        text: Such as ``kill:replica=1,rank=0,step=30``; ``rank`` may be left out and is 0 then.
        replicas: Replica groups of the job, where known.
        ranks_per_replica: Ranks of each, where known.

    Raises:
        ConfigError: Another form, an unknown fault, or a process that the job does not have.
    """
    fault, colon, rest = text.strip().partition(":")
    if fault not in _FAULTS:
        near = difflib.get_close_matches(fault, _FAULTS, 1)
        raise _refused(
            text, f"unknown fault {fault[:40]!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    values: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise _refused(text, f"{part.strip()[:40]!r} is not of the form key=value")
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            raise _refused(
                text, f"unknown key {key[:40]!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        if key in values:
            raise _refused(text, f"{key} is given twice")
        values[key] = value
    if "replica" not in values:
        raise _refused(text, "replica is missing")
    if ("step" in values) == ("after" in values):
        raise _refused(text, "give exactly one of step and after")
    injection = Injection(
        fault=cast("Fault", fault),
        replica=_index(text, "replica", values["replica"], least=0),
        rank=_index(text, "rank", values.get("rank", "0"), least=0),
        step=_index(text, "step", values["step"], least=1) if "step" in values else None,
        after_s=_seconds(text, values["after"]) if "after" in values else None,
    )
    injection.check(
        replicas=replicas if replicas is not None else injection.replica + 1,
        ranks_per_replica=ranks_per_replica if ranks_per_replica is not None else injection.rank + 1,
    )
    return injection


def _refused(text: str, message: str) -> ConfigError:
    return ConfigError(f"--inject {text.strip()[:100]}: {message}", hint=f"the form is {FORM}")


def _index(text: str, key: str, value: str, *, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        raise _refused(text, f"{key} must be a whole number from {least}, not {value[:40]!r}")
    return int(value)


def _seconds(text: str, value: str) -> float:
    if (
        not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", value)
        or not math.isfinite(float(value))
        or float(value) > _LONGEST_S
    ):
        raise _refused(text, f"after must be a number of seconds, not {value[:40]!r}")
    return float(value)
