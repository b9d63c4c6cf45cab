"""How long a training session waits for what, held to the one order in which recovery works."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sky_monarch.errors import ConfigError

__all__ = ["Timeouts"]

# TorchFT lets these win over its arguments, so they are read here first, and checked with the rest.
_TORCHFT_ENV = {
    "TORCHFT_TIMEOUT_SEC": "transfer_s",
    "TORCHFT_QUORUM_TIMEOUT_SEC": "quorum_s",
    "TORCHFT_CONNECT_TIMEOUT_SEC": "dial_s",
}
# The job's `lighthouse` section as JSON, with its own field names.
_JOB_ENV = "SKY_MONARCH_TIMEOUTS"
_JOB_FIELDS = ("join_timeout_s", "heartbeat_timeout_s", "quorum_timeout_s", "process_group_timeout_s")
_RETRIES_ENV = "TORCHFT_QUORUM_RETRIES"
# Between two tries to reach a lighthouse that is down; TorchFT sleeps quorum_s / (retries + 1).
_RETRY_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds, each the longest wait for one thing.

    ``5 x rendezvous < transfer <= collective < quorum`` and ``heartbeat < join <= quorum``: each layer must
    outlast the one whose failure it is to notice. A healing joiner that may take longer than its peers'
    allreduce, or a stuck allreduce that may outlast its peers' wait for the quorum, would make healthy
    replicas fail.
    """

    rendezvous_s: float = 4.0
    """One try of one gloo connection; gloo tries five times."""
    dial_s: float = 20.0
    """Reaching the lighthouse or a peer's manager."""
    transfer_s: float = 90.0
    """Healing from a donor, and every call inside a replica group."""
    collective_s: float = 120.0
    """One allreduce between replica groups. No recovery relies on it: deaths are told."""
    quorum_s: float = 180.0
    """One quorum, from the first member's request to the last one's."""
    first_quorum_s: float = 1800.0
    """The first quorum of a process: other hosts may still be starting."""
    heartbeat_s: float = 2.0
    """The lighthouse's: silence after which it drops a member."""
    join_s: float = 60.0
    """The lighthouse's: how long a first quorum waits for more members."""
    quorum_retries: int = math.ceil(quorum_s / _RETRY_PAUSE_S)
    """Tries to reach a lighthouse that restarts; with none (TorchFT's default) its death is fatal."""

    @property
    def waits_s(self) -> tuple[float, float]:
        """Longest wait for other groups within one step, of a new process and later: a quorum, then an allreduce."""
        return self.first_quorum_s + self.collective_s, self.quorum_s + self.collective_s

    @classmethod
    def derive(cls, base: Timeouts | None = None, env: Mapping[str, str] = os.environ) -> Timeouts:
        """The timeouts in force: ``base``, under TorchFT's environment variables.

        Raises:
            ConfigError: A variable is not a positive whole number, or the order does not hold.
        """
        timeouts = base or cls()
        if _JOB_ENV in env and base is None:
            timeouts = cls._of_job(env[_JOB_ENV])
        for name, field in _TORCHFT_ENV.items():
            if name in env:
                changed: dict[str, Any] = {field: float(_whole_number(name, env[name], least=1))}
                timeouts = replace(timeouts, **changed)
        if _RETRIES_ENV in env:
            timeouts = replace(
                timeouts, quorum_retries=_whole_number(_RETRIES_ENV, env[_RETRIES_ENV], least=0)
            )
        if "TORCHFT_QUORUM_TIMEOUT_SEC" in env and timeouts.first_quorum_s < timeouts.quorum_s:
            timeouts = replace(timeouts, first_quorum_s=timeouts.quorum_s)
        timeouts.validate()
        return timeouts

    @classmethod
    def _of_job(cls, text: str) -> Timeouts:
        """Derive every layer from the job's ``lighthouse`` section."""
        try:
            job = {name: float(json.loads(text)[name]) for name in _JOB_FIELDS}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{_JOB_ENV} is malformed: {error!r}") from error
        collective_s, quorum_s = job["process_group_timeout_s"], job["quorum_timeout_s"]
        return cls(
            rendezvous_s=min(cls().rendezvous_s, collective_s / 6),
            transfer_s=collective_s,
            collective_s=collective_s,
            quorum_s=quorum_s,
            first_quorum_s=max(cls().first_quorum_s, quorum_s),
            heartbeat_s=job["heartbeat_timeout_s"],
            join_s=job["join_timeout_s"],
            quorum_retries=max(1, math.ceil(quorum_s / _RETRY_PAUSE_S)),
        )

    def validate(self) -> None:
        """Check every value and their order.

        Raises:
            ConfigError: Naming both fields, their values, and the order that recovery needs.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "quorum_retries" and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"timeout {item.name} is {value}; it must be positive and finite")
        if self.quorum_retries < 1:
            raise ConfigError(
                f"quorum_retries is {self.quorum_retries}: a lighthouse's restart would end every replica",
                hint=f"leave it, or {_RETRIES_ENV}, at 1 or more",
            )
        ladder = [
            ("5 x rendezvous_s", 5 * self.rendezvous_s, "transfer_s", self.transfer_s, True),
            ("transfer_s", self.transfer_s, "collective_s", self.collective_s, False),
            ("collective_s", self.collective_s, "quorum_s", self.quorum_s, True),
            ("heartbeat_s", self.heartbeat_s, "join_s", self.join_s, True),
            ("join_s", self.join_s, "quorum_s", self.quorum_s, False),
            ("quorum_s", self.quorum_s, "first_quorum_s", self.first_quorum_s, False),
        ]
        for low_name, low, high_name, high, strict in ladder:
            if low > high or (strict and low == high):
                raise ConfigError(
                    f"timeouts in the wrong order: {low_name} ({low:g} s) must be "
                    f"{'less than' if strict else 'at most'} {high_name} ({high:g} s)",
                    hint="needed: 5 x rendezvous_s < transfer_s <= collective_s < quorum_s <= first_quorum_s "
                    "and heartbeat_s < join_s <= quorum_s; TORCHFT_TIMEOUT_SEC sets transfer_s, "
                    "TORCHFT_QUORUM_TIMEOUT_SEC sets quorum_s",
                )


def _whole_number(name: str, text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number of at least {least}")
    return value
