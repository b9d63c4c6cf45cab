"""The peers, with what a storm needs of them beyond one kill at a time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from typing import Any, Protocol

from benches.chaos import figures
from benches.recovery import analysis
from benches.recovery.peers import Peer, Setting
from benches.recovery.sky import SkyMonarch
from benches.recovery.torchft import TUNINGS, TorchFT
from sky_monarch.errors import SkyMonarchError
from tests.support.runs import pid_of
from tests.support.waiting import eventually

# The watchdog's default is at least a minute, much more than a step of this model takes.
_PROGRESS_LIMIT_S = 5.0
_ANSWER_LIMIT_S = 10.0


class Subject(Peer, Protocol):
    """A peer of a storm."""

    def pid(self, group: int) -> int | None:
        """Of a group's process, also while that starts; None: it has none just now."""

    def kill_controller(self) -> bool:
        """SIGKILL what decides beyond one group; False: there is no such thing."""

    def dropped(self, survived: Mapping[int, int]) -> int:
        """Live groups dropped from quorums; of each group as many are right as it was stopped and survived."""


class StormySky(SkyMonarch):
    """A run whose watchdog is set for steps of 40 ms."""

    def job(self) -> dict[str, Any]:
        """The same job with that limit."""
        job = super().job()
        job["recovery"]["progress_limit_s"] = _PROGRESS_LIMIT_S
        return job

    def pid(self, group: int) -> int | None:
        """As ``status`` says; a controller that was just killed says nothing."""
        try:
            return pid_of(self._status(), group) or None
        except (SkyMonarchError, OSError):
            return None

    def kill_lighthouse(self) -> None:
        """SIGKILL; the agent's spare takes its place."""
        self._kill("lighthouse")

    def kill_controller(self) -> bool:
        """SIGKILL; the agent starts another one."""
        self._kill("controller")
        return True

    def observe(self) -> None:
        """Read the history of quorums, where the lighthouse is not just being replaced."""
        with contextlib.suppress(SkyMonarchError, OSError):
            super().observe()

    def restarts(self) -> int:
        """As status counts them, once a controller answers."""
        return eventually(lambda: (self._restarts(),), within_s=_ANSWER_LIMIT_S)[0]

    def dropped(self, survived: Mapping[int, int]) -> int:
        """By the lighthouse's history; generations that were replaced are dead."""
        newest: dict[int, int] = {}
        for event in self._bench.events(self.folder.name):
            if event["event"] == "rank_spawned":
                newest[event["replica"]] = max(newest.get(event["replica"], 0), event["generation"])
        history = [self._history[quorum_id] for quorum_id in sorted(self._history)]
        quorums = [{wire_id: who[0] for wire_id, who in members} for members in history]
        dead = {
            wire_id
            for members in history
            for wire_id, (replica, generation) in members
            if generation < newest.get(replica, 0)
        }
        return figures.false_drops(quorums, survived, dead)

    def _status(self) -> dict[str, Any]:
        return self._bench.status(self.folder.name)

    def _restarts(self) -> int:
        try:
            return super().restarts()
        except (SkyMonarchError, OSError) as error:
            raise AssertionError(f"no status: {error}") from error

    def _kill(self, who: str) -> None:
        def probe() -> bool:
            process = self.folder.process(who)
            if process is None:
                return False
            process.signal(signal.SIGKILL)
            return True

        eventually(probe, within_s=_ANSWER_LIMIT_S, what=f"there is a {who} to be killed")


class StormyTorchFT(TorchFT):
    """TorchFT as it comes. The bench restarts what ended, and the lighthouse, within 20 ms; nobody minds a hang."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, TUNINGS["torchft-default"])

    def kill_controller(self) -> bool:
        """It has none."""
        return False

    def dropped(self, survived: Mapping[int, int]) -> int:
        """By the lighthouse's log; it does not tell who died from who was dropped and never came back."""
        parsed = analysis.parse_torchft_quorums(self._log.read_text(errors="replace"))
        quorums = [{wire_id: _group_of(wire_id) for wire_id in members} for members in parsed]
        return figures.false_drops(quorums, survived, {wire_id for members in parsed for wire_id in members})


def _group_of(wire_id: str) -> int:
    return int(wire_id.partition(":")[0].removeprefix("rep_"))
