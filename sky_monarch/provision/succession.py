"""A head that is lost is had again: what its successor is told of the run, as far as that is known here.

Lighthouse, controller and journal were on it. Without a lighthouse nobody commits anything, so all hosts are taken
down, and the groups go on from the newest checkpoint, on new ones. What the next controller cannot know by itself is
in ``succession.json``: written before anything is taken down, so that a launcher which is killed meanwhile goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.launch.folder import write_json
from sky_monarch.provision.requests import Record

__all__ = ["MOST_FRUITLESS", "Succession", "is_over", "last_attempts", "succession"]

_log = structlog.get_logger()
_FILE = "succession.json"
_BILLED = {"LAUNCHING", "UP"}
_OVER = {"STOPPING", "SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED"}

MOST_FRUITLESS = 3
"""Heads in a row that were lost before anything new was committed."""

_IDS_APART = 1_000
"""Ids of events that the lost controller may have given out, and nobody here has heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """One head follows another.

    Attributes:
        attempt: Which head the next one is; the first is 1.
        reason: What became of the one before.
        step: The last step that it told.
        fruitless: How many heads in a row were lost without a new step.
        cleared: Nothing is left of what the one before had.
        told: What the next controller is told: ``attempt``, ``reason``, ``step``, ``after`` (no event has this id or
            a lower one), ``hosts`` (the newest attempt at each), ``generations`` and ``homes`` by group, ``replicas``,
            and ``spent``.
    """

    attempt: int
    reason: str
    step: int | None = None
    fruitless: int = 0
    cleared: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: Path) -> Succession | None:
        """The newest one of a run; None where its first head is the only one."""
        try:
            kept = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
            return cls(**{**kept, "attempt": int(kept["attempt"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.warning("succession.json cannot be read", error=str(error))
            return None

    def keep(self, run_dir: Path) -> Succession:
        """Write it down.

        Raises:
            OSError: It cannot be.
        """
        write_json(run_dir / _FILE, asdict(self))
        return self

    @property
    def hopeless(self) -> bool:
        """Whether another head would most likely be lost as these were."""
        return self.fruitless >= MOST_FRUITLESS

    def after_clearing(self) -> Succession:
        """The same, once all that the lost head had is gone: until then it was billed."""
        spent = dict(self.told["spent"])
        now_ms = time.time_ns() // 1_000_000
        usd = spent.pop("usd_per_hour") * max(0, now_ms - spent["at_ms"]) / 3.6e6
        # What nobody trained for: the steps since the checkpoint are lost as well, and were paid for once already.
        spent |= {"usd": spent["usd"] + usd, "wasted_usd": spent["wasted_usd"] + usd}
        return replace(self, cleared=True, told={**self.told, "spent": spent})


def succession(
    before: Succession | None,
    status: Mapping[str, Any],
    *,
    reason: str,
    noted_ms: int,
    last_event: int,
    attempts: Mapping[str, int],
) -> Succession:
    """What follows on a head that is lost.

    Args:
        before: How that one came about; None where it was the first.
        status: The last one that it told.
        reason: What became of it.
        noted_ms: When it told that status, Unix time in milliseconds.
        last_event: Id of its last event that is kept here.
        attempts: The newest attempt at each host.
    """
    step, known = status.get("step"), None if before is None else before.step
    further = before is None or (step is not None and (known is None or step > known))
    number = 2 if before is None else before.attempt + 1
    hosts = list(status.get("hosts") or ())
    groups = list(status.get("groups") or ())
    newest = dict(attempts)
    for host in hosts:
        if not host.get("head") and host.get("attempt"):
            newest[host["host"]] = max(int(host["attempt"]), newest.get(host["host"], 0))
    billed = [host.get("usd_per_hour") or 0.0 for host in hosts if host.get("phase") in _BILLED]
    return Succession(
        attempt=number,
        reason=reason,
        step=step if step is not None else known,
        fruitless=0 if further or before is None else before.fruitless + 1,
        told={
            "attempt": number,
            "reason": reason,
            "step": step,
            "after": last_event + _IDS_APART,
            "hosts": newest,
            "generations": {str(group["replica"]): int(group["generation"]) for group in groups},
            "homes": {host["host"]: list(host.get("groups") or ()) for host in hosts if not host.get("head")},
            "replicas": status.get("replicas"),
            "spent": {
                "usd": status.get("cost_usd") or 0.0,
                "wasted_usd": status.get("wasted_usd") or 0.0,
                "usd_per_hour": sum(billed),
                "hours": float(status.get("elapsed_s") or 0.0) / 3600,
                "at_ms": noted_ms,
            },
        },
    )


def is_over(status: Mapping[str, Any]) -> bool:
    """Whether a run was ending, or had ended, when its head told this."""
    return status.get("state") in _OVER


def last_attempts(records: Iterable[Record]) -> dict[str, int]:
    """The newest attempt at each host that was asked for."""
    found: dict[str, int] = {}
    for record in records:
        found[record.host] = max(record.attempt, found.get(record.host, 0))
    return found
