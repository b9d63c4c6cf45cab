"""What is done to a peer, and when."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Collection
from dataclasses import dataclass

from benches.recovery import analysis
from benches.recovery.analysis import Kill
from benches.recovery.peers import Peer, Setting
from benches.recovery.watch import REJOIN_LIMIT_S, Watch, say
from benches.report import busy

_RENDEZVOUS_LIMIT_S = 90.0
_FAST_POLL_S = 0.0005
# Kills come at a random moment of a step, not at the one at which the last poll happened to end.
_PHASE_S = 0.5
_SECOND_KILL_S = 0.010


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One way to hurt.

    Attributes:
        load: What is said of it beside each figure.
        peers: To whom it can be done; who is measured where nobody is named.
        ranks: Of each of the four groups.
        state_gib: Extra state of each rank.
        busy: Every core is kept busy meanwhile.
        victims: Groups killed each time; the second dies up to 10 ms into a survivor's next rendezvous.
            With 0 the lighthouse is killed.
    """

    load: str
    peers: tuple[str, ...] = ("sky-monarch", "torchft-default", "torchft-tuned")
    ranks: int = 1
    state_gib: float = 0.0
    busy: bool = False
    victims: int = 1


_ALL = ("sky-monarch", "torchft-default", "torchft-tuned", "torchrun")
GROUPS = 4
SCENARIOS = {
    "quiet": Scenario(load="quiet", peers=_ALL),
    "busy": Scenario(load="both cores busy", peers=_ALL, busy=True),
    "inner": Scenario(load="quiet, 4 groups x 2 ranks", ranks=2),
    "state": Scenario(load="quiet, 1.5 GiB of extra state", state_gib=1.5),
    "double": Scenario(load="quiet, two groups killed", victims=2),
    "lighthouse": Scenario(load="quiet, lighthouse killed", victims=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often, and how fast.

    Attributes:
        kills: At most.
        spacing_s: Least time between two of them.
        budget_s: No kill after this time, counted from the first; at least one there is.
        impatient: A kill comes whether or not the peer is ready for the next one (its standbys are there).
        seed: Chooses victims and moments.
    """

    kills: int
    spacing_s: float
    budget_s: float
    impatient: bool = False
    seed: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that was measured of one peer."""

    kills: list[analysis.KillFigures]
    steps_per_s: float
    false_drops: int | None
    collateral_crashes: int
    equality: analysis.Equality
    notes: dict[str, float]


class Trial(Watch):
    """One peer in one scenario.

    Args:
        peer: Not started yet.
        setting: Its own.
        scenario: What happens to it.
        plan: How often.
    """

    def __init__(self, peer: Peer, setting: Setting, scenario: Scenario, plan: Plan) -> None:
        super().__init__(peer, setting)
        self._scenario, self._plan = scenario, plan
        self._random = random.Random(plan.seed)

    def run(self) -> Outcome:
        """Start, hurt, compare.

        Raises:
            RuntimeError: Something took longer than its limit, or did not come back.
        """
        peer = self._peer
        self._start()
        self._warm_up()
        with busy() if self._scenario.busy else contextlib.nullcontext():
            self._idle(analysis.SETTLE_S)
            kills = self._hurt()
        end_s = time.monotonic()
        drops_seen_by_then = self._finish(kills)
        figures, unrest_of = [], analysis.unrest(kills, self._logs)
        for kill, following in zip(kills, [*kills[1:], None], strict=True):
            until_s = end_s if following is None else following.at_s
            figures.append(analysis.figures_of(kill, self._logs, until_s=until_s, unrest_of=unrest_of))
        return Outcome(
            kills=figures,
            steps_per_s=analysis.steps_per_s(self._logs),
            false_drops=drops_seen_by_then,
            collateral_crashes=peer.restarts() - sum(len(kill.groups) for kill in kills),
            equality=analysis.equality(self._logs),
            notes=dict(peer.notes()),
        )

    def _hurt(self) -> list[Kill]:
        kills: list[Kill] = []
        started_s = time.monotonic()
        while len(kills) < self._plan.kills:
            if kills and time.monotonic() - started_s > self._plan.budget_s:
                say(f"  {len(kills)} of {self._plan.kills} kills: the time is up")
                break
            self._peer.observe()
            self._poll()
            furthest = analysis.furthest_step(self._logs)
            kill = self._kill()
            kills.append(kill)
            # Groups that died together have nobody to heal from, and begin anew: no progress is waited for then.
            beyond = furthest if kill.groups else -1
            self._wait_in_step(after_s=kill.at_s, not_pids=kill.pids, beyond=beyond, within_s=REJOIN_LIMIT_S)
            back_s = time.monotonic() - kill.at_s
            who = ", ".join(f"group {group}" for group in kill.groups) or "the lighthouse"
            say(f"  killed {who}: all in step again after {back_s:.2f} s")
            if not self._plan.impatient:
                self._warm_up()
            self._idle(max(analysis.SETTLE_S, kill.at_s + self._plan.spacing_s - time.monotonic()))
        return kills

    def _kill(self) -> Kill:
        peer, scenario = self._peer, self._scenario
        victims = self._random.sample(range(self._setting.groups), scenario.victims)
        peer.aim(victims)
        time.sleep(self._random.uniform(0, _PHASE_S))
        at_s = time.monotonic()
        if not victims:
            peer.kill_lighthouse()
            return Kill(at_s=at_s, groups={})
        pids = peer.kill(victims[0])
        groups = {victims[0]: at_s}
        for victim in victims[1:]:
            entered_s = self._wait_rendezvous(after_s=at_s, dead=groups.keys())
            moment_s = entered_s + self._random.uniform(0, _SECOND_KILL_S)
            time.sleep(max(0.0, moment_s - time.monotonic()))
            groups[victim] = time.monotonic()
            say(f"  the second died {(groups[victim] - entered_s) * 1000:.1f} ms into a rendezvous")
            pids |= peer.kill(victim)
        return Kill(at_s=at_s, groups=groups, pids=pids)

    def _wait_rendezvous(self, *, after_s: float, dead: Collection[int]) -> float:
        """When the first survivor entered a rendezvous."""
        survivors = [follower for (group, _), follower in self._followers.items() if group not in dead]

        def entered() -> float | None:
            fresh = [event for follower in survivors for event in follower.poll()]
            times = [e["t"] for e in fresh if e["event"] == "rendezvous" and e["t"] > after_s]
            return min(times, default=None)

        return self._wait(
            entered, _RENDEZVOUS_LIMIT_S, "a survivor enters a rendezvous", every_s=_FAST_POLL_S
        )

    def _finish(self, kills: list[Kill]) -> int | None:
        """Let all log digests of the same steps, and look for the last time."""
        self._wait_digests()
        self._peer.observe()
        return self._peer.false_drops(kills)
