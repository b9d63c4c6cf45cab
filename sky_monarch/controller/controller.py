"""Joins the parts: what arrives is journaled, decided on, and only then acted on.

Crash-only: whatever cannot be handled ends the process, the agent starts it again, and journal and agents
tell the new one the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.config.injection import Injection
from sky_monarch.controller import model
from sky_monarch.controller.agents import Agents, Incoming
from sky_monarch.controller.clocks import HostClocks
from sky_monarch.controller.enrolment import Issuer
from sky_monarch.controller.expectation import Expectation
from sky_monarch.controller.farewell import farewell
from sky_monarch.controller.hosts import fence_reason
from sky_monarch.controller.journal import Journal
from sky_monarch.controller.memory import Memory
from sky_monarch.controller.orders import Orders
from sky_monarch.controller.outputs import Outputs
from sky_monarch.controller.placing import hosts_of, places_anew, write_scale
from sky_monarch.controller.plans import Plans
from sky_monarch.controller.provisioning import Provisioning
from sky_monarch.controller.rebuild import begun, lost_row, recall, successor_row
from sky_monarch.controller.reserve import Reserve
from sky_monarch.controller.room import Room, room_after
from sky_monarch.controller.scale_plan import ScalePlan, plan_scale
from sky_monarch.controller.settings import Settings
from sky_monarch.controller.status import StatusBook
from sky_monarch.controller.timers import Timers
from sky_monarch.controller.tunnel import tunnelled_bytes
from sky_monarch.controller.turn import SILENCES

__all__ = ["Controller"]

_log = structlog.get_logger()

_DRAIN_ITEMS = 512
_WRITE_AGAIN = "journal"  # beside the policy's timers
_WRITE_AGAIN_S = 1.0
_ROOM_S, _ROOM_AGAIN_S = 10.0, 0.5
_HELD_S = 0.1


class Controller:
    """One run, from the first agent to ``final.json``. Lives in one event loop.

    Args:
        settings: What the process was told.
        plans: Builds what agents are given.
        journal: Of this run; may hold the history of an earlier process.
        agents: The accepting side of the channel.
        lost: What became of the journal before this one; None where nothing is known to be lost.
        issuer: The authority of the run, where it has one.
        expectation: Tells the lighthouse how many groups a start is to wait for; None for one that knows of no such
            thing.
        room: How many groups there is room for.

    Attributes:
        hosts: Serves those who provision.
        outputs: What the processes of the run have printed.
    """

    def __init__(
        self,
        settings: Settings,
        plans: Plans,
        journal: Journal,
        agents: Agents,
        *,
        lost: str | None = None,
        issuer: Issuer | None = None,
        expectation: Expectation | None = None,
        room: Room | None = None,
    ) -> None:
        self._settings = settings
        self._plans = plans
        self._journal = journal
        self._agents = agents
        self._limits = plans.limits
        self._lost = lost
        self._memory = self._nothing()
        self._seqs: dict[int, int] = {}
        self._withheld: dict[str, int] = {}
        self._timers = Timers()
        self._orders = Orders(plans, agents, lambda: self._book.fired, self._is_provisioned)
        self._news = asyncio.Event()
        self._final = settings.run_dir / "final.json"
        self._reserve = Reserve(settings.run_dir, groups=self._limits.replicas)
        self._expectation, self._room = expectation, room or Room()
        self._ended = self._scaled = False
        self._end_task: asyncio.Task[None] | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished = asyncio.Event()
        self.outputs = Outputs(
            settings,
            plans,
            agents,
            memory=lambda: self._memory,
            ended=self.ended,
            append=lambda row: self._guarded(lambda: self._record(row))(),
        )
        self._clocks = HostClocks()
        agents.fenced, agents.homes = self._fenced, self._homes
        self.hosts = Provisioning(
            settings,
            issuer,
            memory=lambda: self._memory,
            record=self._record,
            news=self._wait_for_news,
            guarded=self._guarded,
        )

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Rebuild the state from the journal, then listen to the agents."""
        self._replay()
        self._place()
        (self._reserve.give if self._final.exists() else self._reserve.take)()
        self._record({"event": "controller_started", "pid": os.getpid(), "run_id": self._settings.run_id})
        for name in set(self._memory.timers) - set(self._timers):
            self._arm(name, self._memory.timers[name])  # a full window: nobody was here to serve it
        self.hosts.start()
        asyncio.get_running_loop().add_reader(self._agents.fileno(), self._guarded(self._readable))

    def close(self) -> None:
        """Let go of everything; the run is not ended by it."""
        asyncio.get_running_loop().remove_reader(self._agents.fileno())
        self.hosts.close()
        self.outputs.close()
        if self._expectation is not None:
            self._expectation.close()
        self._timers.close()
        if self._end_task is not None:
            self._end_task.cancel()
        self._agents.close()
        self._journal.close()

    def _replay(self) -> None:
        """Know again what was known before."""
        self._journal, self._memory, self._lost = recall(self._journal, self._nothing, self._lost)
        if self._journal.last_id == 0:
            row = lost_row(self._settings.run_dir, self._lost, replicas=self._limits.replicas)
            if row is not None:
                _log.error("the journal was lost", reason=row["reason"], generations=row["generations"])
                self._record(row)
            elif (told := self._settings.succeeds) is not None:
                began = {replica for mine in self._settings.hosts.values() for replica in mine}
                self._journal.begin_after(told["after"])
                self._record(successor_row(told, began))

    def _nothing(self) -> Memory:
        plans, settings = self._plans, self._settings
        return Memory(
            plans.limits,
            settings.hosts,
            has_setup=plans.has_setup,
            checkpoint_target=plans.checkpoint_target,
            provisioned=settings.provisioned,
        )

    @property
    def _state(self) -> model.State:
        return self._memory.state

    @property
    def _book(self) -> StatusBook:
        return self._memory.book

    def _guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        """Crash-only: an error in the loop's own callbacks must end the process, not be logged and passed."""

        def guarded() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  (handed to whoever awaits ``failure``)
                if not self.failure.done():
                    self.failure.set_exception(error)

        return guarded

    # --- events -------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        items = self._agents.drain(_DRAIN_ITEMS)
        received_ns = time.monotonic_ns()  # after what it took to get them: the figure is not to flatter us
        acks: dict[str, int] = {}
        before = self._journal.last_id
        with self._journal.transaction():
            for item in items:
                self._take(item, received_ns, acks)
        self._ack(acks)
        if self._journal.last_id != before:
            self._after_commit()  # progress and log chunks alone wake nobody

    def _ack(self, acks: Mapping[str, int]) -> None:
        """Tell agents what is stored; while the disk takes nothing that is nothing: they keep it, too."""
        if self._journal.behind:
            self._withheld |= acks
            if _WRITE_AGAIN not in self._timers:
                error = self._journal.trouble
                _log.error("events cannot be written and are held in memory", error=error)
                self._write_again()
                self._record({"event": "journal_behind", "error": error})
            return
        for host, seq in acks.items():
            self._agents.send(host, {"type": "ack", "seq": seq})

    def _write_again(self) -> None:
        """Try once a second; nothing is lost with this process before it succeeds, but the orders of clients."""
        if not self._journal.retry():
            self._timers.arm(_WRITE_AGAIN, _WRITE_AGAIN_S, self._guarded(self._write_again))
            return
        self._timers.cancel(_WRITE_AGAIN)
        self._record({"event": "journal_written"})
        withheld, self._withheld = self._withheld, {}
        self._ack(withheld)

    def _take(self, item: Incoming, received_ns: int, acks: dict[str, int]) -> None:
        if self._is_provisioned(item.host):
            data = self._clocks.ours(item.incarnation, item.data, received_ns)
            item = dataclasses.replace(item, data=data)
        match item.kind:
            case "event":
                self._event(item, received_ns)
                acks[item.host] = max(acks.get(item.host, 0), item.data["seq"])
            case "progress":
                progress, news = self._memory.take(item.data)
                for row in news:
                    self._append(row)
                self._note_quorum(progress)
                self._book.progress(progress)
            case "log_chunk":
                self.outputs.questions.answered(item.host, item.data)
            case "connected":
                self._connected(item)
            case "disconnected":
                self.outputs.disconnected(item.host)
                reason = item.data["reason"]
                self._append({"event": "agent_disconnected", "host": item.host, "reason": reason})
            case _:
                who = f"the agent of host {item.host}" if item.host else "a stranger"
                message = f"{who} was dropped: {item.data['reason']}"
                _log.warning("peer dropped", host=item.host or None, reason=item.data["reason"])
                self._append({"event": "notice", "replica": None, "message": message})

    def _note_quorum(self, progress: Mapping[str, Any]) -> None:
        """Of progress only the latest is kept; that the others go on after a failure is worth a row."""
        if self._book.recoveries.awaits(progress):
            names = ("generation", "step", "quorum_id", "participants", "mono_ns")
            row = {name: progress.get(name) for name in names}
            self._append({"event": "quorum_changed", **progress["slot"], **row})

    def _connected(self, item: Incoming) -> None:
        hello = item.data
        self._seqs[item.incarnation] = self._journal.last_seq(item.incarnation)
        attempt = {"attempt": hello["attempt"], "probe": hello.get("probe")} if hello.get("attempt") else {}
        if hello.get("examining"):
            attempt["examining"] = True
        self._append(
            {
                "event": "agent_connected",
                "host": item.host,
                "pid": hello["pid"],
                "incarnation": item.incarnation,
                "groups": [
                    {**group, "pids": {str(rank): pid for rank, pid in group["pids"].items()}}
                    for group in hello["groups"]
                ],
                **attempt,
                **self._untold(item.host, {group["replica"] for group in hello["groups"]}),
            }
        )
        self.outputs.connected(item.host)

    def _untold(self, host: str, told: Collection[int]) -> dict[str, Any]:
        """Generations that an agent of this machine began, and died before anybody heard of them."""
        if self._is_provisioned(host):
            return {}
        replicas = {number for number in self._state.host(host).replicas if number not in told}
        found = begun(self._settings.run_dir, replicas) if replicas else {}
        groups = self._state.groups
        newer = {str(number): last for number, last in found.items() if last > groups[number].generation}
        return {"begun": newer} if newer else {}

    def _fenced(self, host: str, attempt: int) -> str | None:
        return fence_reason(self._state.host(host), attempt, forgotten=self._state.forgotten)

    def _homes(self, host: str) -> frozenset[int]:
        """Groups that an agent of that host may have; where they are was lost with the journal, any."""
        if self._state.forgotten and self._state.host(host).provisioned:
            return frozenset(range(len(self._state.groups)))
        return frozenset(self._state.host(host).replicas)

    def _event(self, item: Incoming, received_ns: int) -> None:
        seq = item.data["seq"]
        known = self._seqs[item.incarnation]
        if seq <= known:
            return  # sent again after a reconnect: it is stored and only needs its ack
        if seq > known + 1:
            _log.warning("events are missing", host=item.host, after=known, got=seq)
        self._seqs[item.incarnation] = seq
        fields = {key: value for key, value in item.data.items() if key != "type"}
        row = {
            **fields,
            "host": item.host,
            "incarnation": item.incarnation,
            "received_ns": received_ns,
        }
        self.outputs.happened(item.host, row)
        self._append(row)

    def _record(self, row: dict[str, Any]) -> None:
        """Journal one thing of our own and do what follows from it."""
        with self._journal.transaction():
            self._append(row)
        self._after_commit()
        self._ack({})

    def _append(self, row: dict[str, Any]) -> None:
        """Store a row and decide; inside a transaction. Acts wait in the outbox until it is committed."""
        row = {"wall_ms": time.time_ns() // 1_000_000, "mono_ns": time.monotonic_ns(), **row}
        stored = self._journal.append(row)
        if stored is None:
            return
        before = self._state
        actions = self._memory.apply(stored)
        if (before.phase, before.reason) != (self._state.phase, self._state.reason):
            change = {"event": "run_state", "state": str(self._state.phase), "reason": self._state.reason}
            self._append({**change, "previous": str(before.phase)})
        if places_anew(row):
            self._place()
        for action in actions:
            self._plan_act(action)

    def _place(self) -> None:
        """Let everybody know which groups there are, and where, once the run was scaled or its job moved."""
        state, settings = self._state, self._settings
        hosts = hosts_of(state)
        began_with = settings.hosts.keys() == hosts.keys() and len(state.groups) == self._limits.replicas
        if began_with and state.replicas == self._limits.replicas and not state.placement:
            return
        self._plans.place(hosts, state.replicas)
        self._agents.place(hosts)
        self._reserve = Reserve(settings.run_dir, groups=len(state.groups))
        self._scaled = True

    def _is_provisioned(self, host: str) -> bool:
        return host in self._state.places and self._state.host(host).provisioned

    def _plan_act(self, action: model.Action) -> None:
        if isinstance(action, model.SetTimer):
            self._arm(action.name, action.delay_s)
        elif isinstance(action, model.CancelTimer):
            self._timers.cancel(action.name)
        elif isinstance(action, model.HostLost):
            groups = [self._book.lost(replica, generation) for replica, generation in action.groups]
            row = {"event": "host_lost", "host": action.host, "attempt": action.attempt, "groups": groups}
            self._append({**row, "reason": action.reason})
        elif isinstance(action, model.GroupsPlaced):
            row = {"event": "groups_placed", "host": action.host, "on": action.on}
            self._append({**row, "groups": list(action.groups), "reason": action.reason})
        elif isinstance(action, model.ScheduleRestart):
            self._append({"event": "restart_scheduled", **dataclasses.asdict(action)})
        elif isinstance(action, model.GiveUpGroup):
            self._append({"event": "group_given_up", **action.row()})
        else:
            row = self._orders.row(action)
            self._append(row)  # no act without its row
            self._orders.add(action)

    def _after_commit(self) -> None:
        if self._scaled:
            self._scaled = False
            write_scale(self._settings, self._state)
            if not self._final.exists():
                self._reserve.take()
            if self._expectation is not None:
                self._expectation.tell(self._state.replicas)
        self._orders.tell()
        if self._journal.summary_due:
            self._journal.compact(self._memory.summary())
        self._news.set()
        self._news = asyncio.Event()
        if self._state.phase.ended and self._end_task is None:
            self._end_task = asyncio.get_running_loop().create_task(self._end())
            self._end_task.add_done_callback(self._end_done)

    # --- timers -------------------------------------------------------------------------------------------

    def _arm(self, name: str, delay_s: float) -> None:
        fire = self._guarded(lambda: self._fire(name))
        arm = self._timers.arm_awake if name.startswith(SILENCES) else self._timers.arm
        arm(name, delay_s, fire)

    def _fire(self, name: str) -> None:
        if self.outputs.holds(name):
            self._arm(name, _HELD_S)
        else:
            self._record({"event": "timer_fired", "timer": name})

    # --- the end ------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Write the end down for good, let readers finish, then let the agents go."""
        state = self._state
        if not self._final.exists():
            if not self._book.ended:
                row = {"event": "run_ended", "state": str(state.phase), "reason": state.reason}
                with self._journal.transaction(durable=True):
                    self._append({**row, "exit_code": state.exit_code})
            await self._write_final()
            _log.info("run ended", state=str(state.phase), reason=state.reason, exit_code=state.exit_code)
        self._ended = True
        self._after_commit()
        taken, collect_s = self.hosts.taken, self._settings.collect_s
        await farewell(state, self._agents, self.outputs.reader, taken=taken, collect_s=collect_s)
        self.finished.set()

    async def _write_final(self) -> None:
        """Write the last status, which had no place kept for it where the disk was full from the start.

        A controller that failed here would be followed by one that knows nothing of an end that is only in memory,
        and would launch anew what was taken down. So the run ends with or without it; ``down`` writes one, too.
        """
        deadline = time.monotonic() + _ROOM_S
        while True:
            try:
                return self._reserve.write(self._final, self.status())
            except OSError as error:
                _log.error("the last status cannot be written", path=str(self._final), error=str(error))
            if time.monotonic() > deadline:
                return None
            shutil.rmtree(self._settings.run_dir / "ship", ignore_errors=True)  # no host needs it any more
            await asyncio.sleep(_ROOM_AGAIN_S)

    def _end_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)

    # --- what the API asks --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The RunStatus document."""
        settings = self._settings
        head = next(iter(settings.hosts))
        facts = {
            "run_id": settings.run_id,
            "name": settings.name,
            "infra": settings.infra,
            "created_ms": settings.created_ms,
            "lighthouse": {
                "kind": settings.lighthouse_kind,
                "address": settings.lighthouse_address,
                "pid": _pid_of(settings.run_dir / "lighthouse.pid"),
            },
            "controller_pid": os.getpid(),
            "agent_pid": self._agents.pid(head),
            "run_dir": str(settings.run_dir),
            "output": self.outputs.facts(),
            "tunnel_bytes": tunnelled_bytes(settings.run_dir) if settings.relay else None,
            "injections_left": [
                str(Injection.from_wire(one))
                for one in settings.injections
                if one["id"] not in self._book.fired
            ],
            **self.hosts.facts(),
        }
        found = self._book.document(self._state, self._limits, facts)
        if (missing := self.hosts.missing()) is not None:
            found["reason"] = "; ".join(filter(None, (found["reason"], missing)))
        return found

    def events(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Events with an id above ``after``, in order."""
        return self._journal.read(after, limit)

    async def more_events(self, after: int, timeout_s: float) -> bool:
        """Wait for an event above ``after``; False where none came in time."""
        if self._journal.last_id <= after:
            await self._wait_for_news(timeout_s)
        return self._journal.last_id > after

    async def _wait_for_news(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def ended(self) -> bool:
        """Whether the run is over and its last event is written."""
        return self._ended

    def down(self, grace_s: float, reason: str) -> None:
        """End the run; a run that is ending already goes on with that."""
        if self._state.phase.ended or self._state.phase is model.RunPhase.STOPPING:
            return
        self._record({"event": "down_requested", "grace_s": grace_s, "reason": reason})

    def scale(self, replicas: int, *, reason: str, dry_run: bool) -> ScalePlan:
        """Have another number of replica groups; one that it has already changes nothing.

        Raises:
            ConfigError: It cannot be; nothing was done.
        """
        plan = plan_scale(self._state, self._limits, replicas, room_after(self._room, self._state))
        if plan.is_change and not dry_run:
            homes = {name: list(mine) for name, mine in plan.homes.items()}
            row = {"replicas": replicas, "previous": plan.previous, "homes": homes, "reason": reason}
            self._record({"event": "scaled", **row})
        return plan


def _pid_of(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not started yet, or being replaced this moment
