"""What the SDK returns: frozen values, with units in their names."""

from __future__ import annotations

import signal
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sky_monarch.errors import (
    BudgetSpentError,
    NoCapacityError,
    RunCancelledError,
    RunFailedError,
    SetupError,
    SupervisionError,
)
from sky_monarch.sdk._record import Record
from sky_monarch.sdk.hosts import HostStatus

__all__ = [
    "TERMINAL_STATES",
    "Event",
    "ExitStatus",
    "FindingStatus",
    "GroupStatus",
    "HostStatus",
    "LighthouseStatus",
    "LogLine",
    "OutputStatus",
    "QuorumStatus",
    "RankStatus",
    "RecoveryRecord",
    "RunStatus",
    "SetupStatus",
]

#: States that a run never leaves.
TERMINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED", "LOST"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus(Record):
    """How a process ended.

    Attributes:
        code: Exit code; None where a signal killed it.
        signal: Number of the signal that killed it.
        oom: The kernel's OOM killer did it.
        collateral: It was ended because another rank of its group had died.
    """

    code: int | None = None
    signal: int | None = None
    oom: bool = False
    collateral: bool = False

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        try:
            text = f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            text = f"killed by signal {self.signal}"
        return f"{text} (out of memory)" if self.oom else text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus(Record):
    """One rank of a replica group.

    Attributes:
        rank: Rank inside the group.
        pid: Its pid while it runs.
        state: What it is doing.
        exit: How it ended last.
    """

    rank: int
    pid: int | None = None
    state: str = ""
    exit: ExitStatus | None = field(default=None, metadata={"of": ExitStatus})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus(Record):
    """One replica group.

    Attributes:
        replica: Which one.
        state: What it is doing.
        generation: Current, or last, generation.
        restarts: Restarts so far.
        restarts_left: Restarts left in the window.
        step: Last committed step.
        loss: Last reported loss.
        quorum_id: Quorum of the last commit.
        participants: Groups that took part in it.
        rate: Committed steps a second, lately.
        metrics: Whatever else its session measured.
        slower: A straggler, which the others wait for: how many times longer its own work on a step takes (from
            2 on); None for any other.
        ranks: Its ranks.
        reason: Why it is in this state.
    """

    replica: int
    state: str = "PENDING"
    generation: int = 0
    restarts: int = 0
    restarts_left: int | None = None
    step: int | None = None
    loss: float | None = None
    quorum_id: int | None = None
    participants: int | None = None
    rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    slower: float | None = None
    ranks: tuple[RankStatus, ...] = field(default=(), metadata={"of": RankStatus})
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord(Record):
    """What one failure cost. Times count from the death, in seconds; None: not reached, or not applicable.

    Attributes:
        replica: Whose failure.
        cause: What happened.
        rank: The rank that it began with: the root cause.
        exit: How that one ended; None where it was ended because it did nothing.
        collateral: Ranks that were ended because that one had failed.
        injected: It was a rehearsal.
        given_up: The group was given up over it.
        generation: The generation that ended.
        next_generation: The one that replaced it.
        wall_ms: When, as Unix time in milliseconds.
        detect_s: Until the agent knew.
        evict_s: Until the lighthouse had dropped the dead generation.
        quorum_s: Until another group committed a step in a quorum without it.
        spawn_s: Until the replacement ran.
        heal_s: Until the replacement had the state of a donor; None where it needed none.
        heal_took_s: How long that transfer took.
        heal_bytes: Its bytes, of the rank that committed first.
        heal_donor: The replica group that gave the state.
        first_commit_s: Until the replacement committed a step.
        lost_steps: Steps that the run committed without this group, from its last commit to its first one
            after the failure: its share of those batches was not trained on. Where the run itself fell back
            (no donor was left), the steps that have to be done again. The survivors of a session lose none:
            they average the interrupted step again.
        lost_samples: Samples that were dealt to it and that no step used, in a session with a sampler; None: none
            were. Nothing that was committed is used again.
        lost_batches: The batches that they were in, 64 at the most: ``sampler.indices_of(number)`` has the samples.
        warm: The replacement was a warm standby.
        step: Last step committed before.
        exception: The exception that ended the rank: ``ValueError: broken``.
        where: ``file:line`` of the user's own code that raised it, or in which the rank hung.
        memory: What a killed rank had: ``peak_bytes``, ``limit_bytes``, ``limit_of`` (``cgroup``, ``host``).
        hung: Of a rank that did nothing: ``rank``, ``state``, and ``native``, where it waited in the kernel.
        tail: Its last lines; of older failures they are only in the log.
    """

    replica: int
    cause: str = ""
    rank: int | None = None
    exit: ExitStatus | None = field(default=None, metadata={"of": ExitStatus})
    collateral: tuple[int, ...] = ()
    injected: bool = False
    given_up: bool = False
    generation: int | None = None
    next_generation: int | None = None
    wall_ms: int | None = None
    detect_s: float | None = None
    evict_s: float | None = None
    quorum_s: float | None = None
    spawn_s: float | None = None
    heal_s: float | None = None
    heal_took_s: float | None = None
    heal_bytes: int | None = None
    heal_donor: int | None = None
    first_commit_s: float | None = None
    lost_steps: int | None = None
    lost_samples: int | None = None
    lost_batches: tuple[int, ...] = ()
    warm: bool | None = None
    step: int | None = None
    exception: str | None = None
    where: str | None = None
    memory: Mapping[str, Any] | None = None
    hung: Mapping[str, Any] | None = None
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumStatus(Record):
    """The current quorum.

    Attributes:
        quorum_id: Its number; it only grows.
        participants: Replica groups in it, or how many.
    """

    quorum_id: int | None = None
    participants: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseStatus(Record):
    """The lighthouse of a run.

    Attributes:
        kind: ``sky-monarch`` or ``torchft``.
        address: Where it listens.
        pid: Its pid.
    """

    kind: str | None = None
    address: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupStatus(Record):
    """The job's ``setup`` command.

    Attributes:
        state: What it is doing.
        exit_code: Its exit code once it has ended.
        tail: Its last lines.
    """

    state: str | None = None
    exit_code: int | None = None
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStatus(Record):
    """What ranks on other hosts have printed.

    Attributes:
        kept_bytes: So much of it is in the run's folder.
        dropped_bytes: So much was printed and is not there: it was more than is kept.
    """

    kept_bytes: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingStatus(Record):
    """One thing that the doctor found on a host.

    Attributes:
        host: Which.
        check: The check that found it, such as ``gpu.memory_errors``.
        severity: ``error`` or ``warning``.
        message: What is so, and what it does.
        fix: What to do.
    """

    host: str
    check: str = ""
    severity: str = ""
    message: str = ""
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(Record):
    """A run.

    Attributes:
        run_id: Its id.
        name: Its name.
        state: One of PENDING SETUP STARTING RUNNING DEGRADED STOPPING SUCCEEDED FAILED FAILED_SETUP
            CANCELLED LOST.
        reason: Why it is in this state.
        exit_code: What the CLI exits with; None while it runs.
        infra: Where it runs.
        created_ms: When it was launched, as Unix time in milliseconds.
        ended_ms: When it ended.
        elapsed_s: How long it has run.
        replicas: Replica groups.
        min_replicas: Fewest groups it goes on with.
        ranks_per_replica: Ranks of each group.
        step: Highest committed step.
        target_step: Step at which the work is done.
        quorum: The current quorum.
        lighthouse: Its lighthouse.
        controller_pid: Pid of its controller.
        agent_pid: Pid of the head's agent.
        run_dir: Its folder.
        groups: Its replica groups.
        recoveries: One record a failure; of very many the newest.
        recoveries_total: Failures so far.
        setup: Its ``setup`` command, where it has one.
        findings: What the doctor found on its hosts before their first step, errors and warnings.
        hosts: Hosts that were provisioned for it; none for a run of this machine.
        cost_usd: What they have cost so far; None where no price is known.
        wasted_usd: Of that, what was paid before an attempt's first commit, and for attempts without one.
        stops_in_s: Seconds until its ``budget`` ends it, if hosts and prices stay as they are; None where nothing does.
        output: How much of what its ranks printed is kept beside its controller; None where they are on this machine.
        tunnel_bytes: What hosts that reach nobody but the head have sent each other through it; None without such.
        injections_left: Rehearsed faults that have not happened (yet), as ``--inject`` takes them.
    """

    run_id: str
    name: str = ""
    state: str = "PENDING"
    reason: str | None = None
    exit_code: int | None = None
    infra: str = "local"
    created_ms: int | None = None
    ended_ms: int | None = None
    elapsed_s: float | None = None
    replicas: int | None = None
    min_replicas: int | None = None
    ranks_per_replica: int | None = None
    step: int | None = None
    target_step: int | None = None
    quorum: QuorumStatus | None = field(default=None, metadata={"of": QuorumStatus})
    lighthouse: LighthouseStatus | None = field(default=None, metadata={"of": LighthouseStatus})
    controller_pid: int | None = None
    agent_pid: int | None = None
    run_dir: str | None = None
    groups: tuple[GroupStatus, ...] = field(default=(), metadata={"of": GroupStatus})
    recoveries: tuple[RecoveryRecord, ...] = field(default=(), metadata={"of": RecoveryRecord})
    recoveries_total: int | None = None
    setup: SetupStatus | None = field(default=None, metadata={"of": SetupStatus})
    findings: tuple[FindingStatus, ...] = field(default=(), metadata={"of": FindingStatus})
    hosts: tuple[HostStatus, ...] = field(default=(), metadata={"of": HostStatus})
    cost_usd: float | None = None
    wasted_usd: float | None = None
    stops_in_s: float | None = None
    output: OutputStatus | None = field(default=None, metadata={"of": OutputStatus})
    tunnel_bytes: int | None = None
    injections_left: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the run has reached a state that it never leaves."""
        return self.state in TERMINAL_STATES

    def check(self) -> Self:
        """Return itself, unless the run ended badly.

        Raises:
            SetupError: Its ``setup`` failed.
            SupervisionError: It could not hold ``min_replicas``.
            RunCancelledError: ``down`` ended it.
            BudgetSpentError: It cost what it may cost.
            NoCapacityError: There was no room for it.
            RunFailedError: It failed otherwise.
        """
        if not self.ended or self.state == "SUCCEEDED":
            return self
        by_code: dict[int | None, type[RunFailedError | SetupError | SupervisionError | NoCapacityError]] = {
            3: NoCapacityError,
            4: SupervisionError,
            5: SetupError,
            8: RunCancelledError,
            9: BudgetSpentError,
        }
        raise by_code.get(self.exit_code, RunFailedError)(
            f"run {self.run_id} is {self.state}: {self.reason or 'no reason was given'}",
            hint=f"`sky-monarch logs {self.run_id} --tail 50` shows its last lines",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        id: Place in the run's history, counted from 1.
        wall_ms: When, as Unix time in milliseconds.
        event: What kind.
        fields: What else is known, by name.
    """

    id: int
    wall_ms: int
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build from one line of the API."""
        own = ("id", "wall_ms", "event")
        rest = {key: item for key, item in value.items() if key not in own}
        return cls(
            id=int(value.get("id", 0)),
            wall_ms=int(value.get("wall_ms", 0)),
            event=str(value.get("event", "unknown")),
            fields=rest,
        )

    def to_json(self) -> dict[str, Any]:
        """The line it was built from."""
        return {"id": self.id, "wall_ms": self.wall_ms, "event": self.event, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a rank's output, without its line end.

    Attributes:
        replica: Whose; None: ``setup``.
        rank: Which rank; None: ``setup``.
        generation: Which generation.
        line: The text; bytes that are no UTF-8 are replaced.
        missing_bytes: It was not printed: it stands for so many bytes that are not kept any more.
    """

    replica: int | None
    rank: int | None
    generation: int
    line: str
    missing_bytes: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build from one line of the API."""
        replica = value.get("replica")
        setup = replica is None or replica == "setup"
        rank = value.get("rank")
        return cls(
            replica=None if setup else int(typing.cast(int, replica)),
            rank=None if setup or rank is None else int(rank),
            generation=int(value.get("generation") or 0),
            line=str(value.get("line", "")),
            missing_bytes=int(value.get("missing_bytes") or 0),
        )

    @property
    def prefix(self) -> str:
        """``[replica/rank]`` or ``[setup]``."""
        return "[setup]" if self.replica is None else f"[{self.replica}/{self.rank}]"

    def to_json(self) -> dict[str, Any]:
        """The line it was built from."""
        replica = "setup" if self.replica is None else self.replica
        found = {"replica": replica, "rank": self.rank, "generation": self.generation, "line": self.line}
        return {**found, "missing_bytes": self.missing_bytes} if self.missing_bytes else found
