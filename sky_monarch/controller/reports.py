"""Checks what agents say and turns journal rows into events of the policy.

The same function reads a row when it happens and when a restarted controller replays it: both decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.causes import describe_cause, describe_exit, exit_failed
from sky_monarch.controller.host_reports import HOST_EVENTS
from sky_monarch.errors import ProtocolError

__all__ = ["check_hello", "check_report", "policy_event"]

_U64 = 2**64
_MAX_TEXT = 64 * 1024
_MAX_ADDRESS = 64


def _unsigned(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < _U64


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(_text(line) for line in value)


def _exit(value: object) -> bool:
    return isinstance(value, Mapping) and any(_integer(value.get(kind)) for kind in ("code", "signal"))


def _pids(value: object) -> bool:
    return isinstance(value, list) and all(_unsigned(pid) for pid in value)


def _early(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_unsigned(step) for step in value)


def _metrics(value: object) -> bool:
    return isinstance(value, Mapping) and all(_text(k) and _number(v) for k, v in value.items())


def _memory(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and _unsigned(value.get("peak_bytes"))
        and (value.get("limit_bytes") is None or _unsigned(value["limit_bytes"]))
        and value.get("limit_of") in ("cgroup", "host")
    )


def _heal(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(_unsigned(value.get(name)) for name in ("at_ns", "bytes", "step"))
        and _number(value.get("took_s"))
        and (value.get("donor") is None or _unsigned(value["donor"]))
    )


def _reached(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping)
        and _text(one.get("host"))
        and _text(one.get("address"))
        and _flag(one.get("ok"))
        and (one.get("error") is None or _text(one["error"]))
        and (one.get("rtt_s") is None or _number(one["rtt_s"]))
        for one in value
    )


def _findings(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping)
        and all(_text(one.get(name)) for name in ("check", "severity", "message"))
        and (one.get("fix") is None or _text(one["fix"]))
        for one in value
    )


def _address(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_ADDRESS and value.rpartition(":")[2].isdecimal()


def _bytes(value: object) -> bool:
    return isinstance(value, bytes)


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


_Checks = dict[str, Callable[[object], bool]]
_WHOSE: _Checks = {"replica": _unsigned, "generation": _unsigned}
_RANK: _Checks = {**_WHOSE, "rank": _unsigned}
_EVENTS: dict[str, _Checks] = {
    "setup_started": {},
    "setup_finished": {"exit": _exit, "timed_out": _flag, "tail": _texts},
    "generation_started": {**_WHOSE, "store": _or_none(_address)},
    "rank_spawned": {**_RANK, "pid": _unsigned, "warm": _flag},
    "rank_exited": {
        **_RANK,
        "pid": _unsigned,
        "exit": _exit,
        "collateral": _flag,
        "oom": _flag,
        "tail": _texts,
        "traceback": _or_none(_texts),
        "memory": _or_none(_memory),
    },
    "hung": {**_RANK, "pid": _unsigned, "state": _text, "stacks": _texts, "threads": _texts},
    "generation_ended": {
        **_WHOSE,
        "cause": _text,
        "step": _or_none(_unsigned),
        "never_ran": _or_none(_text),
    },
    "restart_scheduled": {**_WHOSE, "delay_s": _number, "restarts_left": _unsigned},
    "ranks_up": _WHOSE,
    "first_commit": {**_WHOSE, "step": _unsigned, "heal": _or_none(_heal)},
    "group_given_up": {**_WHOSE, "cause": _text, "restarts": _unsigned},
    "group_done": {**_WHOSE, "step": _or_none(_unsigned)},
    "group_stopped": _WHOSE,
    "host_leaving": {"kind": _or_none(_text), "reason": _text, "grace_s": _number},
    "standby_ready": {"replica": _unsigned, "rank": _unsigned, "pid": _unsigned},
    "injected": {**_RANK, "injection": _unsigned, "fault": _text},
    "evicted": {**_WHOSE, "quorum_id": _or_none(_integer), "orderly": _or_none(_flag)},
    "reached": {"from": _text, "targets": _reached},
    "examined": {"findings": _findings, "took_s": _number},
    "swept": {"pids": _pids},
    "notice": {"replica": _or_none(_unsigned), "message": _text},
}
_CAUSES: dict[str, _Checks] = {
    "rank_exited": {"rank": _unsigned, "exit": _exit, "early": _or_none(_early)},
    "startup_limit": {"limit_s": _number},
    "progress_limit": {"limit_s": _number},
    "spawn_failed": {"error": _text},
    "cannot_start": {"error": _text, "times": _unsigned},
    "elsewhere": {"reason": _text},
    "agent_failed": {"error": _text},
    "stopped": {"reason": _text},
}
_STAMP: _Checks = {"seq": _unsigned, "mono_ns": _unsigned, "wall_ms": _unsigned, "event": _text}
_PROGRESS: _Checks = {
    "generation": _unsigned,
    "mono_ns": _unsigned,
    "step": _unsigned,
    "target_step": _or_none(_unsigned),
    "quorum_id": _or_none(_integer),
    "participants": _or_none(_unsigned),
}
_LOG_CHUNK: _Checks = {"request": _unsigned, "offset": _unsigned, "data": _bytes, "eof": _flag}


def _require(message: Mapping[str, Any], checks: _Checks, what: str) -> None:
    for field, check in checks.items():
        if not check(message.get(field)):
            raise ProtocolError(f"{what} has no usable {field}: {message.get(field)!r:.80}")


def check_report(report: object, *, replicas: frozenset[int], ranks: int) -> str:
    """Check one report of an agent before anything is done with it.

    Args:
        report: What arrived.
        replicas: Replica groups on the host of that agent.
        ranks: Ranks in each group.

    Returns:
        ``"event"``, ``"progress"`` or ``"log_chunk"``.

    Raises:
        ProtocolError: It is not what the protocol allows.
    """
    if not isinstance(report, Mapping):
        raise ProtocolError(f"a report is a map, got {type(report).__name__}")
    kind = report.get("type")
    if kind == "event":
        _require(report, _STAMP, "an event")
        name = report["event"]
        checks = _EVENTS.get(name)
        if checks is None:
            raise ProtocolError(f"unknown event {name!r:.80}")
        _require(report, checks, f"event {name}")
        if "cause" in checks:
            cause = _CAUSES.get(report["cause"])
            if cause is None:
                raise ProtocolError(f"event {name} has the unknown cause {report['cause']!r:.80}")
            _require(report, cause, f"event {name}, cause {report['cause']}")
        _check_place(report.get("replica"), report.get("rank"), replicas, ranks)
    elif kind == "progress":
        _require(report, _PROGRESS, "progress")
        slot = report.get("slot")
        if not isinstance(slot, Mapping) or not _metrics(report.get("metrics", {})):
            raise ProtocolError("progress has no usable slot or metrics")
        _require(slot, {"replica": _unsigned, "rank": _unsigned}, "a slot")
        _check_place(slot["replica"], slot["rank"], replicas, ranks)
    elif kind == "log_chunk":
        _require(report, _LOG_CHUNK, "a log chunk")
    else:
        raise ProtocolError(f"unknown report {kind!r:.80}")
    return str(kind)


def _check_place(replica: int | None, rank: int | None, replicas: frozenset[int], ranks: int) -> None:
    if replica is not None and replica not in replicas:
        raise ProtocolError(f"replica {replica} does not live on this host")
    if rank is not None and rank >= ranks:
        raise ProtocolError(f"rank {rank} is not below {ranks}")


def check_hello(peer: object, hosts: Collection[str], *, replicas: frozenset[int], ranks: int) -> None:
    """Check who dialled and what it says it supervises; whether that lives there is another question.

    Raises:
        ProtocolError: It is not an agent of this run.
    """
    if not isinstance(peer, Mapping) or peer.get("role") != "agent":
        raise ProtocolError("only agents dial the controller")
    known: _Checks = {"host": _text, "pid": _unsigned, "incarnation": _unsigned}
    known |= {"attempt": _or_none(_unsigned), "probe": _or_none(_text), "certificate": _or_none(_text)}
    known |= {"examining": _or_none(_flag)}
    _require(peer, known, "a hello")
    if peer["host"] not in hosts:
        raise ProtocolError(f"host {peer['host']!r:.80} is not part of this run")
    groups = peer.get("groups")
    if not isinstance(groups, list):
        raise ProtocolError("a hello names its groups in a list")
    for group in groups:
        if not isinstance(group, Mapping):
            raise ProtocolError("a group snapshot is a map")
        _require(group, {**_WHOSE, "state": _text, "restarts": _unsigned}, "a group snapshot")
        pids = group.get("pids")
        if group["state"].upper() not in model.GroupPhase.__members__ or not isinstance(pids, Mapping):
            raise ProtocolError("a group snapshot has no usable state or pids")
        _check_place(group["replica"], None, replicas, ranks)
        for rank, pid in pids.items():
            # Keys of a map may arrive as text: JSON knows no others.
            if not str(rank).isdecimal() or not _unsigned(pid):
                raise ProtocolError("a group snapshot has no usable pids")
            _check_place(None, int(rank), replicas, ranks)


def policy_event(row: Mapping[str, Any]) -> model.Event | None:
    """The event that a checked journal row is to the policy; None where it is none."""
    build = _POLICY.get(str(row["event"]))
    return None if build is None else build(row)


def _connected(row: Mapping[str, Any]) -> model.Event:
    return model.AgentConnected(
        host=row["host"],
        incarnation=int(row["incarnation"]),
        mono_ns=row["mono_ns"],
        groups=tuple(
            model.Snapshot(
                replica=group["replica"],
                generation=group["generation"],
                state=model.GroupPhase[group["state"].upper()],
                live=frozenset(int(rank) for rank in group["pids"]),
                restarts=group["restarts"],
            )
            for group in row["groups"]
        ),
        attempt=row.get("attempt", 0),
        probe=row.get("probe"),
        examining=bool(row.get("examining")),
        begun=tuple((int(replica), number) for replica, number in row.get("begun", {}).items()),
    )


def _journal_lost(row: Mapping[str, Any]) -> model.Event:
    final = row["final"]
    scaled, placed = row.get("scaled"), row.get("placed")
    return model.JournalLost(
        placed=None if placed is None else _placed(placed),
        scaled=None if scaled is None else _scaled({**scaled, "reason": row["reason"]}),
        reason=row["reason"],
        generations=tuple((int(replica), number) for replica, number in row["generations"].items()),
        outcome=None if final is None else model.RunPhase(final["state"]),
        ended=("", 1) if final is None else (final["reason"], final["exit_code"]),
    )


def _head_replaced(row: Mapping[str, Any]) -> model.Event:
    scaled = row.get("scaled")
    return model.HeadReplaced(
        reason=row["reason"],
        attempts=tuple(row["hosts"].items()),
        generations=tuple((int(replica), number) for replica, number in row["generations"].items()),
        scaled=None if scaled is None else _scaled({**scaled, "reason": row["reason"]}),
    )


def _placed(row: Mapping[str, Any]) -> model.JobPlaced:
    homes = tuple((name, tuple(replicas)) for name, replicas in row["homes"].items())
    return model.JobPlaced(choice=row["choice"], homes=homes)


def _scaled(row: Mapping[str, Any]) -> model.Scaled:
    homes = tuple((name, tuple(replicas)) for name, replicas in row["homes"].items())
    return model.Scaled(replicas=row["replicas"], homes=homes, reason=row["reason"])


def _setup_finished(row: Mapping[str, Any]) -> model.Event:
    failure = None
    if row["timed_out"]:
        failure = "it ran into its time limit"
    elif exit_failed(row["exit"]):
        failure = f"it {describe_exit(row['exit'])}"
    killed = "signal" in row["exit"] and not row["timed_out"]
    return model.SetupFinished(host=row["host"], failure=failure, killed=killed)


def _restart_scheduled(row: Mapping[str, Any]) -> model.Event:
    # Another host has another clock, and a group may move: windows are of the controller's.
    at_ns = row.get("received_ns", row["mono_ns"])
    return model.RestartScheduled(replica=row["replica"], generation=row["generation"], mono_ns=at_ns)


def _rank_exited(row: Mapping[str, Any]) -> model.Event:
    failed = exit_failed(row["exit"]) and not row["collateral"]
    words = f"rank {row['rank']} {describe_exit(row['exit'], oom=row['oom'])}"
    return model.RankExited(**_rank(row), failure=words if failed else None)


def _whose(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"replica": row["replica"], "generation": row["generation"], "host": row.get("host", "")}


def _rank(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**_whose(row), "rank": row["rank"]}


def _when(row: Mapping[str, Any]) -> int | None:
    """By the controller's clock."""
    at_ns: int | None = row.get("received_ns", row.get("mono_ns"))
    return at_ns


_POLICY: dict[str, Callable[[Mapping[str, Any]], model.Event]] = {
    "controller_started": lambda _row: model.ControllerStarted(),
    "journal_lost": _journal_lost,
    "head_replaced": _head_replaced,
    "job_placed": _placed,
    "agent_connected": _connected,
    "agent_disconnected": lambda row: model.AgentDisconnected(host=row["host"]),
    "down_requested": lambda row: model.DownRequested(grace_s=row["grace_s"], reason=row["reason"]),
    "scaled": _scaled,
    "timer_fired": lambda row: model.TimerFired(name=row["timer"]),
    "setup_started": lambda row: model.SetupStarted(host=row["host"]),
    "setup_finished": _setup_finished,
    "generation_started": lambda row: model.GenerationStarted(
        **_whose(row), store=row.get("store"), mono_ns=_when(row)
    ),
    "rank_spawned": lambda row: model.RankSpawned(**_rank(row)),
    "rank_exited": _rank_exited,
    "ranks_up": lambda row: model.RanksUp(**_whose(row)),
    "first_commit": lambda row: model.FirstCommit(**_whose(row)),
    "generation_ended": lambda row: model.GenerationEnded(
        **_whose(row),
        reason=describe_cause(row),
        stopped=row["cause"] == "stopped",
        never_ran=row.get("never_ran"),
        mono_ns=_when(row),
    ),
    "restart_scheduled": _restart_scheduled,
    "group_given_up": lambda row: model.GroupGivenUp(
        **_whose(row), restarts=row["restarts"], reason=describe_cause(row)
    ),
    "group_done": lambda row: model.GroupDone(**_whose(row), step=row["step"]),
    "group_stopped": lambda row: model.GroupStopped(**_whose(row), mono_ns=_when(row)),
    **HOST_EVENTS,
}
