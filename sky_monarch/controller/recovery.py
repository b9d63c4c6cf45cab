"""One record for each failure: what died, why, and how long each phase of the way back took.

Built from events alone, so that a restarted controller, and a reader of the journal, gets the same records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sky_monarch.controller import evidence
from sky_monarch.controller.causes import describe_cause

__all__ = ["MAX_RECORDS", "RecoveryBook"]

MAX_RECORDS = 500
"""Records kept; the oldest go first, and are only counted."""

_TAILS = 20
"""So many records, the newest, keep the last lines of their process: a status is asked for often."""

_BATCHES = 64
"""Lost batches of one failure that are listed; the samples of all are counted."""

_LOSSES = 16
"""Losses of one group whose failure is not known yet."""


@dataclass(slots=True, eq=False)
class _Record:
    replica: int
    generation: int
    died_ns: int
    wall_ms: int
    rank: int | None = None
    exit: Mapping[str, Any] | None = None
    oom: bool = False
    cause: str = "unknown"
    injected: bool = False
    collateral: list[int] = field(default_factory=list)
    received_ns: int | None = None
    evicted_ns: int | None = None
    evicted_quorum: int | None = None
    quorum_ns: int | None = None
    spawned_ns: int | None = None
    committed_ns: int | None = None
    heal: Mapping[str, Any] | None = None
    next_generation: int | None = None
    spawned: int = 0
    warm: bool = True
    step: int | None = None
    first_step: int | None = None
    given_up: bool = False
    ended: bool = False
    lost: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)

    def since_death_s(self, at_ns: int | None) -> float | None:
        return None if at_ns is None else max(0, at_ns - self.died_ns) / 1e9

    def lost_steps(self) -> int | None:
        """Steps that the run committed without the group, or, where the run fell back, has to do again.

        Not what the survivors lost: a session averages the interrupted step again and loses none.
        """
        if self.step is None or self.first_step is None:
            return None
        missed = self.first_step - self.step - 1
        return missed if missed >= 0 else self.step - self.first_step + 1

    def has_lost(self, loss: Mapping[str, Any]) -> bool:
        """Whether a step that went on without the group's samples did so for this failure."""
        since, until = self.step or 0, self.first_step
        return loss["step"] >= since and (until is None or loss["step"] < until)

    def document(self) -> dict[str, Any]:
        heal = self.heal or {}
        batches = [batch for loss in self.lost for batch in loss["batches"]]
        return {
            "replica": self.replica,
            "cause": self.cause,
            "rank": self.rank,
            "exit": self.exit,
            "oom": self.oom,
            "injected": self.injected,
            "collateral": list(self.collateral),
            "generation": self.generation,
            "next_generation": self.next_generation,
            "given_up": self.given_up,
            "wall_ms": self.wall_ms,
            "detect_s": self.since_death_s(self.received_ns),
            "evict_s": self.since_death_s(self.evicted_ns),
            "quorum_s": self.since_death_s(self.quorum_ns),
            "spawn_s": self.since_death_s(self.spawned_ns),
            "heal_s": self.since_death_s(heal.get("at_ns")),
            "heal_took_s": heal.get("took_s"),
            "heal_bytes": heal.get("bytes"),
            "heal_donor": heal.get("donor"),
            "first_commit_s": self.since_death_s(self.committed_ns),
            "lost_steps": self.lost_steps(),
            "lost_samples": sum(loss["samples"] for loss in self.lost) if self.lost else None,
            "lost_batches": batches[:_BATCHES],
            "warm": None if self.spawned_ns is None else self.warm,
            "step": self.step,
            "exception": self.evidence.get("exception"),
            "where": self.evidence.get("where"),
            "memory": self.evidence.get("memory"),
            "hung": self.evidence.get("hung"),
            "tail": self.evidence.get("tail") or [],
        }


class RecoveryBook:
    """Collects the records of a run.

    Args:
        ranks_per_replica: A group is back when so many ranks were spawned.
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self._ranks = ranks_per_replica
        self._records: list[_Record] = []
        self._open: dict[int, _Record] = {}
        self._injected_ns: dict[tuple[int, int], int] = {}
        self._hung: dict[int, Mapping[str, Any]] = {}
        self._without_quorum: dict[int, _Record] = {}  # the newest of each replica group
        self._losses: dict[int, list[Mapping[str, Any]]] = {}
        self._silent: dict[str, tuple[int, int]] = {}  # since when hosts are, monotonic and wall clock
        self.total = 0
        """Failures so far, with those whose record is gone."""

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event of the journal; those that say nothing about a failure are passed over."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def documents(self) -> list[dict[str, Any]]:
        """The records, oldest first, as ``recoveries`` of RunStatus; times in seconds since the death."""
        return [record.document() for record in self._records]

    def awaits(self, progress: Mapping[str, Any]) -> bool:
        """Whether a commit is the first, after some failure, of a quorum without the dead generation."""
        return any(self._formed(record, progress) for record in self._without_quorum.values())

    @staticmethod
    def _formed(record: _Record, commit: Mapping[str, Any]) -> bool:
        held, now = record.evicted_quorum, commit.get("quorum_id")
        whose = commit["slot"]["replica"] if "slot" in commit else commit["replica"]
        later = held is not None and now is not None and now > held
        return later and whose != record.replica and commit["mono_ns"] >= record.died_ns

    def _on_quorum_changed(self, event: Mapping[str, Any]) -> None:
        for replica, record in list(self._without_quorum.items()):
            if self._formed(record, event):
                record.quorum_ns = event["mono_ns"]
                del self._without_quorum[replica]

    def _on_samples_lost(self, event: Mapping[str, Any]) -> None:
        loss = {name: event[name] for name in ("step", "batches", "samples")}
        newest = next((one for one in reversed(self._records) if one.replica == event["replica"]), None)
        if newest is not None and newest.has_lost(loss):
            newest.lost.append(loss)
            return
        # The others commit without a group that hangs before its end is told.
        waiting = self._losses.setdefault(event["replica"], [])
        waiting.append(loss)
        del waiting[:-_LOSSES]

    def _on_hung(self, event: Mapping[str, Any]) -> None:
        known = self._hung.get(event["replica"])
        if known is None or known["generation"] < event["generation"]:
            self._hung[event["replica"]] = event  # the first is the one that was late

    def summary(self) -> dict[str, Any]:
        """All that it remembers, as JSON values."""
        # A record that is waited for may be so old that it is kept for nothing but this.
        awaited = {id(one): one for one in (*self._open.values(), *self._without_quorum.values())}
        records = [*(one for one in awaited.values() if one not in self._records), *self._records]
        return {
            "records": [asdict(record) for record in records],
            "kept": len(self._records),
            "open": [number for number, one in enumerate(records) if self._open.get(one.replica) is one],
            "without_quorum": [
                number for number, one in enumerate(records) if self._without_quorum.get(one.replica) is one
            ],
            "hung": [dict(event) for event in self._hung.values()],
            "injected": [[*place, at_ns] for place, at_ns in self._injected_ns.items()],
            "losses": [
                [replica, [dict(loss) for loss in losses]] for replica, losses in self._losses.items()
            ],
            "silent": {host: list(since) for host, since in self._silent.items()},
            "total": self.total,
        }

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Take up what :meth:`summary` gave."""
        records = [_Record(**record) for record in summary["records"]]
        self._records = records[len(records) - summary["kept"] :]
        self._open = {records[number].replica: records[number] for number in summary["open"]}
        self._without_quorum = {
            records[number].replica: records[number] for number in summary.get("without_quorum", [])
        }
        self._hung = {event["replica"]: event for event in summary.get("hung", [])}
        self._injected_ns = {
            (replica, generation): at_ns for replica, generation, at_ns in summary["injected"]
        }
        self._losses = {replica: list(losses) for replica, losses in summary.get("losses", [])}
        self._silent = {host: (at_ns, at_ms) for host, (at_ns, at_ms) in summary.get("silent", {}).items()}
        self.total = summary["total"]

    def _on_injected(self, event: Mapping[str, Any]) -> None:
        # A rehearsed death is timed from the act itself, not from when somebody saw it.
        self._injected_ns[event["replica"], event["generation"]] = event["mono_ns"]

    def _on_rank_exited(self, event: Mapping[str, Any]) -> None:
        record = self._open.get(event["replica"])
        same = record is not None and record.generation == event["generation"]
        if event["collateral"]:
            if record is not None and same:
                record.collateral.append(event["rank"])
            return
        if event["exit"].get("code") == 0 and not same:
            return  # the end of its work; where it is not, generation_ended says so
        if record is not None and same:
            return  # the first rank that died is the root cause
        record = self._begin(event, rank=event["rank"], exit_=event["exit"], oom=event["oom"])
        record.evidence = evidence.of_exit(event)

    def _on_generation_ended(self, event: Mapping[str, Any]) -> None:
        losses = self._losses.pop(event["replica"], [])
        record = self._open.get(event["replica"])
        if record is not None and record.ended and record.generation == event["generation"]:
            return  # another host of the group: what ended first is the root cause
        if event["cause"] == "stopped":
            self._forget(event)
            return
        if record is None or record.generation != event["generation"]:
            record = self._begin(event, rank=event.get("rank"), exit_=event.get("exit"), oom=False)
        hung = self._hung.pop(event["replica"], None)
        if hung is not None and hung["generation"] == event["generation"]:
            record.evidence |= evidence.of_hang(hung)
            record.rank = hung["rank"] if record.rank is None else record.rank
        if event["cause"] == "rank_exited":
            record.rank, record.exit = event["rank"], event["exit"]
            record.collateral = [rank for rank in record.collateral if rank != event["rank"]]
        if event["cause"] != "elsewhere" or record.cause == "unknown":
            record.cause = describe_cause(event, oom=record.oom)
        record.ended = event["cause"] != "elsewhere"
        record.step = event["step"] if record.step is None else record.step
        record.lost += [dict(loss) for loss in losses if record.has_lost(loss)]

    def _on_evicted(self, event: Mapping[str, Any]) -> None:
        record = self._of_dead(event)
        if record is not None and record.evicted_ns is None:
            record.evicted_ns = event["mono_ns"]
            record.evicted_quorum = event["quorum_id"]
            self._without_quorum[event["replica"]] = record

    def _on_agent_disconnected(self, event: Mapping[str, Any]) -> None:
        self._silent.setdefault(event["host"], (event["mono_ns"], event["wall_ms"]))

    def _on_agent_connected(self, event: Mapping[str, Any]) -> None:
        self._silent.pop(event.get("host", ""), None)

    def _on_host_lost(self, event: Mapping[str, Any]) -> None:
        """A host went, and with it whoever could have told of it: it ended when it fell silent."""
        now = event["mono_ns"], event["wall_ms"]
        died_ns, wall_ms = self._silent.get(event["host"], now)
        for lost in event["groups"]:
            replica = lost["replica"]
            record = self._open.get(replica)
            if record is None or record.generation < lost["generation"]:
                death = {"replica": replica, "generation": lost["generation"], "mono_ns": died_ns}
                record = self._begin({**death, "wall_ms": wall_ms}, rank=None, exit_=None, oom=False)
                record.received_ns = now[0]
                record.cause = f"host {event['host']} was lost: {event['reason']}"
            record.step = lost["step"] if record.step is None else record.step
            # The lighthouse drops who is silent by itself, and tells no agent of ours that could say so.
            if lost["quorum_id"] is not None and record.evicted_quorum is None:
                record.evicted_quorum = lost["quorum_id"]
                self._without_quorum[replica] = record

    def _on_group_given_up(self, event: Mapping[str, Any]) -> None:
        record = self._of_dead(event)
        if record is not None:
            record.given_up = True
            record.cause = describe_cause(event, oom=record.oom)

    def _on_restart_scheduled(self, event: Mapping[str, Any]) -> None:
        record = self._open.get(event["replica"])
        if record is not None and event["generation"] > record.generation:
            record.next_generation = event["generation"]

    def _on_generation_started(self, event: Mapping[str, Any]) -> None:
        self._on_restart_scheduled(event)

    def _on_rank_spawned(self, event: Mapping[str, Any]) -> None:
        record = self._open.get(event["replica"])
        if record is None or event["generation"] <= record.generation:
            return
        record.next_generation = event["generation"]
        record.spawned += 1
        record.warm = record.warm and event["warm"]
        if record.spawned >= self._ranks:
            record.spawned_ns = event["mono_ns"]

    def _on_first_commit(self, event: Mapping[str, Any]) -> None:
        record = self._open.get(event["replica"])
        if record is not None and event["generation"] > record.generation:
            record.committed_ns = event["mono_ns"]
            record.first_step = event["step"]
            record.heal = event.get("heal")
            del self._open[event["replica"]]

    def _of_dead(self, event: Mapping[str, Any]) -> _Record | None:
        record = self._open.get(event["replica"])
        return record if record is not None and record.generation == event["generation"] else None

    def _begin(
        self, event: Mapping[str, Any], *, rank: int | None, exit_: Mapping[str, Any] | None, oom: bool
    ) -> _Record:
        injected_ns = self._injected_ns.pop((event["replica"], event["generation"]), None)
        record = _Record(
            replica=event["replica"],
            generation=event["generation"],
            died_ns=event["mono_ns"] if injected_ns is None else min(injected_ns, event["mono_ns"]),
            wall_ms=event["wall_ms"],
            rank=rank,
            exit=exit_,
            oom=oom,
            injected=injected_ns is not None,
            received_ns=event.get("received_ns"),
        )
        if exit_ is not None and rank is not None:
            record.cause = describe_cause({"cause": "rank_exited", "rank": rank, "exit": exit_}, oom=oom)
        self._records.append(record)
        self.total += 1
        del self._records[:-MAX_RECORDS]
        if len(self._records) > _TAILS:
            self._records[-_TAILS - 1].evidence.pop("tail", None)
        self._open[event["replica"]] = record
        return record

    def _forget(self, event: Mapping[str, Any]) -> None:
        """A generation that was stopped on request is no failure, whatever its ranks exited with."""
        record = self._of_dead(event)
        if record is not None:
            self._records = [one for one in self._records if one is not record]  # it may be gone already
            self.total -= 1
            del self._open[event["replica"]]
