"""Events in one line each, for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sky_monarch.cli._output import number, plain, seconds

if TYPE_CHECKING:
    from sky_monarch.sdk.types import Event

__all__ = ["describe", "exit_text", "is_failure", "is_routine", "line", "memory_text", "size_text"]

_Fields = Mapping[str, Any]


def exit_text(exit_: Any, *, oom: bool = False) -> str:
    """How a process ended: ``exited with code 7``, ``killed by SIGKILL (out of memory)``."""
    from sky_monarch.sdk.types import ExitStatus

    if not isinstance(exit_, Mapping):
        return str(exit_ or "ended")
    return str(ExitStatus.from_json({**exit_, "oom": oom}))


def _cause(fields: _Fields) -> str:
    kind = fields.get("cause")
    if kind == "rank_exited":
        early = fields.get("early")
        before = f" before the end ({early[0]}/{early[1]})" if early else ""
        return f"rank {fields.get('rank')} {exit_text(fields.get('exit'))}{before}"
    if kind == "startup_limit":
        return f"no first commit within {seconds(fields.get('limit_s'))}"
    if kind == "progress_limit":
        return f"no commit for {seconds(fields.get('limit_s'))}"
    if kind == "spawn_failed":
        return f"could not be started: {fields.get('error')}"
    if kind == "cannot_start":
        return f"its command cannot be started, {fields.get('times')} times in a row: {fields.get('error')}"
    if kind == "agent_failed":
        return f"its agent failed at looking after it (please report this): {fields.get('error')}"
    if kind == "stopped":
        return f"stopped: {fields.get('reason')}"
    if kind == "elsewhere":
        return f"ended on another host: {fields.get('reason')}"
    if kind == "budget":
        return str(fields.get("reason"))
    return str(kind)


def _why(fields: _Fields) -> str:
    return f" ({fields['reason']})" if fields.get("reason") else ""


def _at(fields: _Fields) -> str:
    return "" if fields.get("step") is None else f" at step {fields['step']}"


def _exited(fields: _Fields) -> str:
    ended = exit_text(fields.get("exit"), oom=bool(fields.get("oom")))
    who = f"rank {fields.get('rank')} of generation {fields.get('generation')} (pid {fields.get('pid')})"
    if fields.get("collateral"):
        return f"{who} {ended}, ended with its group"
    why = ""
    if fields.get("traceback"):
        from sky_monarch.tracebacks import culprit

        found = culprit(fields["traceback"])
        why = f": {found.exception}" if found.exception else ""
        why += f" at {found.where}" if found.where else ""
    return f"{who} {ended}{why}"


def _hung(fields: _Fields) -> str:
    from sky_monarch.tracebacks import hung_at

    where = hung_at(fields.get("stacks") or ())
    if where is None and fields.get("threads"):
        where = f"thread {fields['threads'][0]}"
    return f"rank {fields.get('rank')} hangs, {fields.get('state')}{f', at {where}' if where else ''}"


def _scheduled(fields: _Fields) -> str:
    when = seconds(fields.get("delay_s"))
    return (
        f"generation {fields.get('generation')} starts in {when}, {fields.get('restarts_left')} restarts left"
    )


def _evicted(fields: _Fields) -> str:
    # After an end in order the lighthouse is told too, so that nobody waits for heartbeats: no failure.
    how = "has left" if fields.get("orderly") else "evicted at"
    return f"generation {fields.get('generation')} {how} the lighthouse"


def _run_state(fields: _Fields) -> str:
    if fields.get("reason") and fields.get("state") == fields.get("previous"):
        return f"run: {fields['reason']}"  # the state stays, what there is to say of it is new
    return f"run is {fields.get('state')}{_why(fields)}"


def _failed_checkpoint(fields: _Fields) -> str:
    why = fields.get("error") or "its log says why"
    return f"the checkpoint of step {fields.get('step')} was not saved to {fields.get('to')}: {why}"


def _reached(fields: _Fields) -> str:
    targets = fields.get("targets") or ()
    errors = [str(target.get("error")) for target in targets if not target.get("ok")]
    names = ", ".join(str(target.get("host")) for target in targets)
    return "; ".join(errors) or f"host {fields.get('host')} reaches {names}"


def _examined(fields: _Fields) -> str:
    """What the doctor found: ``host h0 was examined in 0.2 s: gpu.access: this user cannot open /dev/kfd; fix: …``."""
    findings = fields.get("findings") or ()
    bad = [one for one in findings if one.get("severity") == "error"]
    warnings = sum(one.get("severity") == "warning" for one in findings)
    words = [
        f"{one.get('check')}: {one.get('message')}" + (f"; fix: {one['fix']}" if one.get("fix") else "")
        for one in bad
    ]
    if warnings:
        words.append(f"{warnings} warning(s)")
    found = ", ".join(words) or "nothing is wrong"
    return f"host {fields.get('host')} was examined in {seconds(fields.get('took_s'))}: {found}"


def _host_report(fields: _Fields) -> str:
    """What became of a host: ``host demo-h1, attempt 2: launched (slurm/loop, 3.20 $/h)``."""
    state = str(fields.get("state"))
    details = [str(fields["kind"])] if fields.get("kind") else []
    if state == "launching":  # of the failure before
        details = [f"in candidate {int(fields.get('choice') or 0) + 1}"] if details else []
    if state == "launched":
        details += [str(fields["place"])] if fields.get("place") else []
        details += [f"{fields['usd_per_hour']:.2f} $/h"] if fields.get("usd_per_hour") else []
    told = f" ({', '.join(details)})" if details else ""
    why = f": {fields['reason']}" if fields.get("reason") else ""
    who = f"host {fields.get('host')}, attempt {fields.get('attempt')}"
    return f"{who}: {state.replace('_', ' ')}{told}{why}"


def _some(groups: object) -> str:
    """The groups of a host, for people."""
    return ",".join(map(str, groups)) if isinstance(groups, list) and groups else "spare"


_TEXTS: Mapping[str, Callable[[_Fields], str]] = {
    "setup_started": lambda _: "setup began",
    "setup_finished": lambda f: (
        f"setup {exit_text(f.get('exit'))}{', out of time' if f.get('timed_out') else ''}"
    ),
    "generation_started": lambda f: f"generation {f.get('generation')} starts",
    "rank_spawned": lambda f: (
        f"rank {f.get('rank')} runs, pid {f.get('pid')}{', was on standby' if f.get('warm') else ''}"
    ),
    "rank_exited": _exited,
    "hung": _hung,
    "quorum_changed": lambda f: f"goes on in quorum {f.get('quorum_id')} with step {f.get('step')}",
    "generation_ended": lambda f: f"generation {f.get('generation')} ended{_at(f)}: {_cause(f)}",
    "restart_scheduled": _scheduled,
    "ranks_up": lambda f: f"generation {f.get('generation')} runs, no session has reported so far",
    "first_commit": lambda f: f"generation {f.get('generation')} committed step {f.get('step')}",
    "group_given_up": lambda f: f"given up, restarts spent: {f.get('restarts')}; {_cause(f)}",
    "group_done": lambda f: f"done{_at(f)}",
    "group_stopped": lambda _: "stopped",
    "standby_ready": lambda f: f"standby for rank {f.get('rank')} is ready, pid {f.get('pid')}",
    "host_leaving": lambda f: (
        f"host {f.get('host')} is leaving, {seconds(f.get('grace_s'))} are left: {f.get('reason')}"
    ),
    "injected": lambda f: (
        f"rehearsal: {f.get('fault')} of rank {f.get('rank')}, generation {f.get('generation')}"
    ),
    "evicted": _evicted,
    "reached": _reached,
    "examined": _examined,
    "swept": lambda f: f"left-over processes ended: {', '.join(map(str, f.get('pids') or ()))}",
    "notice": lambda f: str(f.get("message")),
    "checkpoint_saved": lambda f: (
        f"checkpoint of step {f.get('step')} is complete, {f.get('bytes')} bytes, in {f.get('to')}"
    ),
    "checkpoint_failed": _failed_checkpoint,
    "checkpoint_no_room": lambda f: (
        f"checkpoints will not fit in {f.get('to')}: {size_text(f.get('needed_bytes') or 0)} are needed, "
        f"there is room for {size_text(f.get('room_bytes') or 0)}"
    ),
    "checkpoint_restored": lambda f: f"goes on from the checkpoint of step {f.get('step')} in {f.get('to')}",
    "checkpoint_damaged": lambda f: (
        f"the checkpoint of step {f.get('step')} in {f.get('to')} is damaged, an older one was tried"
    ),
    "samples_lost": lambda f: (
        f"step {f.get('step')} went on without its {f.get('samples')} samples,"
        f" batch {', '.join(map(str, f.get('batches') or ()))}"
    ),
    "controller_started": lambda f: f"controller runs, pid {f.get('pid')}",
    "agent_connected": lambda f: f"agent of host {f.get('host')} is connected, pid {f.get('pid')}",
    "agent_disconnected": lambda f: f"agent of host {f.get('host')} is gone: {f.get('reason')}",
    "host_report": _host_report,
    "host_lost": lambda f: f"host {f.get('host')}, attempt {f.get('attempt')} is lost{_why(f)}",
    "groups_placed": lambda f: (
        f"groups {', '.join(map(str, f.get('groups') or ()))} go from host {f.get('host')} to {f.get('on')}{_why(f)}"
    ),
    "job_placed": lambda f: (
        f"groups are placed for candidate {int(f.get('choice') or 0) + 1}: "
        + ", ".join(f"{name} {_some(mine)}" for name, mine in (f.get("homes") or {}).items())
    ),
    "head_launched": lambda f: (
        f"the head, {f.get('cluster')}, bills {number(f.get('usd_per_hour'), 3)} $/h since its launch"
    ),
    "head_replaced": lambda f: (
        f"{f.get('reason')}; head {f.get('attempt')} goes on, and the groups from their checkpoint"
    ),
    "launcher_came": lambda _: "a launcher asks which hosts are wanted",
    "launcher_gone": lambda f: (
        f"no launcher has asked for {seconds(f.get('silent_s'))} which hosts are wanted"
    ),
    "budget_spent": lambda f: str(f.get("reason")),
    "down_requested": lambda f: f"down was asked for: {f.get('reason')}",
    "run_state": _run_state,
    "run_ended": lambda f: f"run ended: {f.get('state')}{_why(f)}",
    "command": lambda f: f"told to {str(f.get('command')).replace('_', ' ')}{_why(f)}",
}

_INTERNAL = frozenset({"seq", "mono_ns", "incarnation", "replica", "host"})


def describe(event: Event) -> str:
    """What happened, without time and place."""
    known = _TEXTS.get(event.event)
    if known is not None:
        return plain(known(event.fields)).replace("\n", " ")
    if event.fields.get("message"):
        return plain(str(event.fields["message"])).replace("\n", " ")
    rest = " ".join(
        f"{key}={value}" for key, value in event.fields.items() if key not in _INTERNAL and value is not None
    )
    return plain(f"{event.event.replace('_', ' ')}{' ' if rest else ''}{rest}").replace("\n", " ")


def is_routine(event: Event) -> bool:
    """Whether only a reader of the whole history wants it: what the controller orders and remembers."""
    if event.event == "examined":
        return not is_failure(event)
    return event.event in ("command", "timer_fired", "run_ended")


def size_text(count: float) -> str:
    """Bytes for people: ``1.9 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def memory_text(memory: _Fields) -> str:
    """What a killed process had: ``it had 1.9 GiB at most, the limit of its cgroup is 2.0 GiB``."""
    words = f"it had {size_text(memory.get('peak_bytes') or 0)} at most"
    limit = memory.get("limit_bytes")
    if limit is None:
        return words
    whose = "the limit of its cgroup is" if memory.get("limit_of") == "cgroup" else "the host has"
    return f"{words}, {whose} {size_text(limit)}"


def is_failure(event: Event) -> bool:
    """Whether it tells of something that went wrong by itself."""
    fields = event.fields
    if event.event == "generation_ended":
        return fields.get("cause") != "stopped"
    if event.event == "rank_exited":
        exit_ = fields.get("exit")
        return not fields.get("collateral") and exit_ != {"code": 0}
    if event.event == "examined":
        return any(one.get("severity") == "error" for one in fields.get("findings") or ())
    return event.event in ("group_given_up", "checkpoint_failed", "checkpoint_damaged")


def line(event: Event) -> str:
    """Time, replica and what happened: ``18:40:02 replica 1: rank 0 … killed by SIGKILL``."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.wall_ms / 1000))
    replica = event.fields.get("replica")
    place = "" if replica is None else f"replica {replica}: "
    return f"{clock} {place}{describe(event)}"
