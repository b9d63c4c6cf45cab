"""The RunStatus document: the policy's state joined with what only people want (pids, steps, rates)."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sky_monarch.controller.causes import exit_failed
from sky_monarch.controller.model import GroupPhase, Limits, State
from sky_monarch.controller.placing import groups_added
from sky_monarch.controller.recovery import RecoveryBook
from sky_monarch.controller.spans import Place

__all__ = ["StatusBook"]

_RATE_WINDOW_S = 15.0
_RATE_SAMPLES = 64
_BUSY_SAMPLES, _FEWEST_BUSY = 32, 5
_SLOW_RATIO = 2.0
_GENERATIONS = 1000  # whose output can be asked for by number
_MOST_FINDINGS = 20  # of one host; the event has all


@dataclass(slots=True)
class _Rank:
    pid: int | None = None
    state: str = "pending"
    exit: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Group:
    ranks: dict[int, _Rank]
    generations: deque[int] = field(default_factory=lambda: deque(maxlen=_GENERATIONS))
    restarts: int = 0
    failures: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by rank, since the last commit
    step: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))

    busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=_BUSY_SAMPLES))

    def begin(self, generation: int) -> None:
        if not self.generations or generation > self.generations[-1]:
            self.restarts += bool(self.generations)
            self.generations.append(generation)
            self.samples.clear()
            self.busy_s.clear()
            for rank in self.ranks.values():
                rank.pid, rank.state = None, "pending"

    def rate(self, now_ns: int) -> float | None:
        """Committed steps a second over the last seconds; None before the second commit."""
        oldest_ns = now_ns - round(_RATE_WINDOW_S * 1e9)
        recent = [sample for sample in self.samples if sample[0] >= oldest_ns]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        return (recent[-1][1] - recent[0][1]) / ((recent[-1][0] - recent[0][0]) / 1e9)


class StatusBook:
    """Collects what the policy does not need, from journal rows and progress reports.

    Args:
        replicas: Replica groups that the run begins with.
        ranks: Ranks in each.
        has_setup: The job has a setup command.
        places: Which part each host has of a wide group.
    """

    def __init__(
        self, replicas: int, ranks: int, *, has_setup: bool, places: Mapping[str, Place] | None = None
    ) -> None:
        self._ranks = ranks
        self._groups: list[_Group] = []
        self._add(replicas)
        self._places = places or {}
        self._setup: dict[str, Any] | None = {"state": "PENDING", "exit_code": None, "tail": []}
        if not has_setup:
            self._setup = None
        self._first_ns: int | None = None
        self._ended_ns: int | None = None
        self._ended_ms: int | None = None
        self._target_step: int | None = None
        self.recoveries = RecoveryBook(ranks)
        self._findings: dict[str, list[dict[str, Any]]] = {}
        self.fired: set[int] = set()
        """Injections that were carried out: they are once per run."""

    def _add(self, count: int) -> None:
        self._groups += [_Group(ranks={rank: _Rank() for rank in range(self._ranks)}) for _ in range(count)]

    def apply(self, row: Mapping[str, Any]) -> None:
        """Take one row of the journal."""
        self._add(sum(map(len, groups_added(row).values())))
        if self._first_ns is None:
            self._first_ns = row.get("mono_ns")
        self.recoveries.apply(row)
        match row["event"]:
            case "setup_started" if self._setup is not None:
                self._setup["state"] = "RUNNING"
            case "setup_finished" if self._setup is not None:
                failed = row["exit"].get("code") != 0 or row["timed_out"]
                self._setup = {
                    "state": "FAILED" if failed else "DONE",
                    "exit_code": row["exit"].get("code"),
                    "signal": row["exit"].get("signal"),
                    "timed_out": row["timed_out"],
                    "tail": row["tail"],
                }
            case "agent_connected":
                place = self._places.get(row.get("host", ""))
                for snapshot in row["groups"]:
                    self._adopt(snapshot, range(self._ranks) if place is None else place.ranks)
            case "generation_started":
                self._groups[row["replica"]].begin(row["generation"])
            case "rank_spawned":
                group = self._groups[row["replica"]]
                group.begin(row["generation"])
                group.ranks[row["rank"]] = _Rank(pid=row["pid"], state="running")
            case "rank_exited":
                self._exited(row)
            case "first_commit" | "group_done" | "generation_ended":
                group = self._groups[row["replica"]]
                if row["event"] == "first_commit":
                    group.failures.clear()
                if row["step"] is not None:
                    group.step = row["step"]
            case "examined":
                bad = [one for one in row["findings"] if one["severity"] in ("error", "warning")]
                self._findings[row["host"]] = [{"host": row["host"], **one} for one in bad[:_MOST_FINDINGS]]
            case "injected":
                self.fired.add(row["injection"])
            case "head_replaced":
                spent_s = row["spent"]["hours"] * 3600 + max(0, row["wall_ms"] - row["spent"]["at_ms"]) / 1e3
                self._first_ns = row["mono_ns"] - round(spent_s * 1e9)
            case "run_ended":
                self._ended_ns, self._ended_ms = row["mono_ns"], row["wall_ms"]

    def _adopt(self, snapshot: Mapping[str, Any], here: range) -> None:
        group = self._groups[snapshot["replica"]]
        if snapshot["generation"]:
            group.begin(snapshot["generation"])
        pids = {int(rank): pid for rank, pid in snapshot["pids"].items()}
        for rank, known in group.ranks.items():
            if rank in pids:
                group.ranks[rank] = _Rank(pid=pids[rank], state="running")
            elif known.state == "running" and rank in here:
                known.pid, known.state = None, "exited"

    def _exited(self, row: Mapping[str, Any]) -> None:
        group = self._groups[row["replica"]]
        if group.generations and row["generation"] < group.generations[-1]:
            return
        exit_ = {**row["exit"], "oom": row["oom"], "collateral": row["collateral"]}
        if row["collateral"]:
            # A stop that cut a new try short says less than the failure that made the try necessary.
            exit_ = group.failures.get(row["rank"], exit_)
        elif exit_failed(row["exit"]):
            group.failures[row["rank"]] = exit_
        group.ranks[row["rank"]] = _Rank(state="exited", exit=exit_)

    def progress(self, report: Mapping[str, Any]) -> None:
        """Take a progress report; older generations than the newest known say nothing any more."""
        group = self._groups[report["slot"]["replica"]]
        if group.generations and report["generation"] < group.generations[-1]:
            return
        if report.get("target_step") is not None:
            self._target_step = max(self._target_step or 0, report["target_step"])
        same = report["generation"] == group.progress.get("generation")
        if same and report["step"] < group.progress["step"]:
            return
        group.progress = report
        group.step = report["step"]
        if not group.samples or report["step"] != group.samples[-1][1]:
            group.samples.append((report["mono_ns"], report["step"]))
            if "busy_s" in (report.get("metrics") or {}):
                group.busy_s.append(report["metrics"]["busy_s"])

    def summary(self) -> dict[str, Any]:
        """What the journal has told, as JSON values; progress is told anew by the agents."""
        return {
            "groups": [
                {
                    "ranks": {str(rank): [one.pid, one.state, one.exit] for rank, one in group.ranks.items()},
                    "generations": list(group.generations),
                    "restarts": group.restarts,
                    "failures": {str(rank): exit_ for rank, exit_ in group.failures.items()},
                    "step": group.step,
                }
                for group in self._groups
            ],
            "setup": self._setup,
            "times": [self._first_ns, self._ended_ns, self._ended_ms],
            "target_step": self._target_step,
            "recoveries": self.recoveries.summary(),
            "fired": sorted(self.fired),
            "findings": self._findings,
        }

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take up what :meth:`summary` gave."""
        self._add(len(summary["groups"]) - len(self._groups))
        for group, known in zip(self._groups, summary["groups"], strict=True):
            for rank, (pid, state, exit_) in known["ranks"].items():
                group.ranks[int(rank)] = _Rank(pid=pid, state=state, exit=exit_)
            group.generations.extend(known["generations"])
            group.restarts = known["restarts"]
            group.failures = {int(rank): exit_ for rank, exit_ in known["failures"].items()}
            group.step = known["step"]
        self._setup = summary["setup"]
        self._first_ns, self._ended_ns, self._ended_ms = summary["times"]
        self._target_step = summary["target_step"]
        self.recoveries.restore(summary["recoveries"])
        self.fired = set(summary["fired"])
        self._findings = dict(summary.get("findings", {}))  # older ones know of none

    @property
    def ended(self) -> bool:
        """Whether the end of the run is written down."""
        return self._ended_ns is not None

    def lost(self, replica: int, generation: int) -> dict[str, Any]:
        """What is known of a generation that went with its host: where it was last seen."""
        group = self._groups[replica]
        quorum_id = group.progress.get("quorum_id")
        return {"replica": replica, "generation": generation, "step": group.step, "quorum_id": quorum_id}

    def generations(self, replica: int) -> tuple[int, ...]:
        """Every generation of a group that began, in order."""
        return tuple(self._groups[replica].generations)

    def document(self, state: State, limits: Limits, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The RunStatus document.

        Args:
            state: What the policy knows.
            limits: Of the run.
            facts: Fields that neither knows: run_id, name, created_ms, pids…
        """
        now_ns = time.monotonic_ns()
        groups = [self._group_document(number, state, limits, now_ns) for number in range(len(self._groups))]
        ended_ns = self._ended_ns or now_ns
        elapsed_s = 0.0 if self._first_ns is None else max(0, ended_ns - self._first_ns) / 1e9
        return {
            **facts,
            "state": str(state.phase),
            "reason": state.reason,
            "exit_code": state.exit_code if state.phase.ended else None,
            "ended_ms": self._ended_ms,
            "elapsed_s": round(elapsed_s, 3),
            "replicas": state.replicas,
            "min_replicas": limits.min_replicas,
            "ranks_per_replica": limits.ranks_per_replica,
            "step": max((group["step"] for group in groups if group["step"] is not None), default=None),
            "target_step": self._target_step,
            "quorum": self._quorum(),
            "groups": groups,
            "recoveries": self.recoveries.documents(),
            "recoveries_total": self.recoveries.total,
            "setup": self._setup,
            "findings": [one for findings in self._findings.values() for one in findings],
        }

    def _quorum(self) -> dict[str, Any] | None:
        known = [group.progress for group in self._groups if group.progress.get("quorum_id") is not None]
        if not known:
            return None
        newest = max(known, key=lambda progress: (progress["quorum_id"], progress["step"]))
        return {"quorum_id": newest["quorum_id"], "participants": newest.get("participants")}

    def _slower(self, number: int) -> float | None:
        """How many times longer a group works on a step than the others do; None where that is nothing to tell.

        All groups commit at the pace of the slowest: only what each does between its waits tells them apart.
        """
        medians = {
            replica: statistics.median(group.busy_s)
            for replica, group in enumerate(self._groups)
            if len(group.busy_s) >= _FEWEST_BUSY
        }
        own = medians.pop(number, None)
        others = statistics.median(medians.values()) if medians else 0.0
        if own is None or others <= 0.0 or own < _SLOW_RATIO * others:
            return None
        return round(own / others, 1)

    def _group_document(self, number: int, state: State, limits: Limits, now_ns: int) -> dict[str, Any]:
        group, policy = self._groups[number], state.groups[number]
        metrics = dict(group.progress.get("metrics") or {})
        window_ns = round(limits.window_s * 1e9)
        spent = sum(at > now_ns - window_ns for at in policy.restarts_ns)
        given_up = policy.phase is GroupPhase.GIVEN_UP
        return {
            "replica": number,
            "state": str(policy.phase),
            "generation": policy.generation,
            "restarts": group.restarts,
            "restarts_left": 0 if given_up else max(0, limits.max_restarts - spent),
            "step": group.step,
            "loss": metrics.get("loss"),
            "quorum_id": group.progress.get("quorum_id"),
            "participants": group.progress.get("participants"),
            "rate": None if policy.phase.final else group.rate(now_ns),
            "metrics": metrics,
            "slower": None if policy.phase.final else self._slower(number),
            "ranks": [
                {"rank": rank, "pid": known.pid, "state": known.state, "exit": known.exit}
                for rank, known in sorted(group.ranks.items())
            ],
            "reason": policy.failed_after or policy.reason,
        }
