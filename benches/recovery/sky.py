"""Peer ``sky-monarch``: the product as a user runs it, at its defaults, seen through its SDK."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benches.recovery.analysis import Kill, came_back, left_unkilled
from benches.recovery.peers import Setting
from sky_monarch.launch.folder import RunFolder
from sky_monarch.sdk.run import Run
from tests.support.runs import Workbench, quiet_sockets

_NAME = "recovery"
_STANDBY_LIMIT_S = 90.0
_STANDBY_POLL_S = 1.0


class SkyMonarch:
    """One run of a job."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._bench = Workbench(setting.folder)
        self._aimed: dict[int, tuple[int, frozenset[int]]] = {}
        self._killed: set[tuple[int, int]] = set()
        # The lighthouse keeps so many quorums, and forgets them when it is restarted.
        self._history: dict[int, list[tuple[str, tuple[int, int]]]] = {}
        self._seen: list[dict[str, Any]] = []

    def job(self) -> dict[str, Any]:
        """The job file."""
        setting = self._setting
        command = [sys.executable, "-m", "benches.recovery.train_sky", "--folder", str(setting.folder)]
        command += ["--state-gib", str(setting.state_gib), "--task", setting.task]
        command += ["--block", str(setting.block)]
        command += ["--mark-rendezvous"] if setting.mark_rendezvous else []
        return {
            "name": _NAME,
            "replicas": setting.groups,
            "ranks_per_replica": setting.ranks,
            "run": shlex.join(command),
            "preload": ["sky_monarch.training.session"],
            # Not at their defaults: the peer's fork server has built nothing ahead but its imports, so a hot
            # standby is ours alone; and nobody kills eight times a group in ten minutes but a bench.
            "recovery": {
                "standby_until": "session",
                "max_restarts": 8 + 2 * setting.kills,
                # At a gate nobody makes progress for as long as the bench likes.
                **({"progress_limit_s": "off"} if setting.block else {}),
            },
        }

    def start(self) -> None:
        """``sky-monarch up --detach``."""
        self._bench.names.append(_NAME)  # also where `up` is interrupted there may be a run to end
        self._bench.up(self._bench.write(json.dumps(self.job(), indent=1), name=f"{_NAME}.yaml"))

    @property
    def folder(self) -> RunFolder:
        """Of the run."""
        return self._bench.folder_of(_NAME)

    def warm_up(self) -> bool:
        """Wait for all standbys: for each slot, that one is ready and was not promoted since.

        To look must not cost what is being measured: the survivors share their two processors with this process.
        """
        wanted = self._setting.groups * self._setting.ranks
        deadline = time.monotonic() + _STANDBY_LIMIT_S
        while True:
            ready: set[tuple[int, int]] = set()
            for event in self._events():
                if event["event"] == "standby_ready":
                    ready.add((event["replica"], event["rank"]))
                elif event["event"] == "rank_spawned":
                    ready.discard((event["replica"], event["rank"]))
            if len(ready) >= wanted or time.monotonic() > deadline:
                return len(ready) >= wanted
            time.sleep(_STANDBY_POLL_S)

    def _events(self) -> list[dict[str, Any]]:
        """All so far; only new ones are asked for."""
        after = self._seen[-1]["id"] if self._seen else 0
        with quiet_sockets(), Run(self._bench.folder_of(_NAME)) as run:
            self._seen += [event.to_json() for event in run.events(after=after)]
        return self._seen

    def aim(self, groups: Collection[int]) -> None:
        """Read the pids in ``status --json``."""
        status = self._bench.status(_NAME)
        for group in groups:
            shown = status["groups"][group]
            pids = frozenset(rank["pid"] for rank in shown["ranks"] if rank["pid"])
            if len(pids) != self._setting.ranks:
                raise RuntimeError(f"group {group} is to be killed, but has not all its ranks: {shown}")
            self._aimed[group] = (shown["generation"], pids)

    def kill(self, group: int) -> frozenset[int]:
        """SIGKILL its pids; its agent does the rest."""
        generation, pids = self._aimed.pop(group)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._killed.add((group, generation))
        return pids

    def tend(self) -> None:
        """Nothing to do: the agent restarts what crashed."""

    def kill_lighthouse(self) -> None:
        """SIGKILL its pid of ``status --json``; the agent restarts it."""
        os.kill(self._bench.status(_NAME)["lighthouse"]["pid"], signal.SIGKILL)

    def restarts(self) -> int:
        """As status counts them."""
        return sum(group["restarts"] for group in self._bench.status(_NAME)["groups"])

    def observe(self) -> None:
        """Read the lighthouse's history of quorums."""
        from sky_monarch.actors.lighthouse_control import LighthouseControl

        folder = self.folder
        address = f"unix:{folder.info['sockets']['lighthouse']}"
        control = LighthouseControl(address, token=folder.token or "", run_id=folder.run_id)
        for quorum in control.state()["history"]:
            members = [(m["id"], (m["replica"], m["generation"])) for m in quorum["members"]]
            self._history[quorum["quorum_id"]] = members

    def false_drops(self, kills: Sequence[Kill]) -> int:  # noqa: ARG002  # generations say more than pids
        """Members that left and came back, or left for good without having been killed."""
        history = [self._history[quorum_id] for quorum_id in sorted(self._history)]
        quorums = [frozenset(wire_id for wire_id, _ in members) for members in history]
        killed = {wire_id for members in history for wire_id, who in members if who in self._killed}
        return came_back(quorums) + left_unkilled(quorums, killed)

    def notes(self) -> Mapping[str, float]:
        """Rejoins from a standby, the time in which the next one is ready, and the product's own records."""
        records = self._bench.status(_NAME)["recoveries"]
        notes = {"warm_rejoins": float(sum(bool(record["warm"]) for record in records))}
        for key in ("detect_s", "evict_s"):
            values = [record[key] for record in records if record[key] is not None]
            if values:
                notes[f"{key}_max"] = max(values)
        if refills_s := self._refills_s():
            notes["standby_refill_s_median"] = statistics.median(refills_s)
            notes["standby_refill_s_max"] = max(refills_s)
        return notes

    def _refills_s(self) -> list[float]:
        """From each replacement's first commit until the group's next standby was ready."""
        committed_ns: dict[int, int] = {}
        refills_s = []
        for event in self._events():
            if event["event"] == "first_commit" and event["generation"] > 1:
                committed_ns[event["replica"]] = event["mono_ns"]
            elif event["event"] == "standby_ready" and event["replica"] in committed_ns:
                refills_s.append((event["mono_ns"] - committed_ns.pop(event["replica"])) / 1e9)
        return refills_s

    def close(self) -> None:
        """``sky-monarch down``."""
        self._bench.close()
