"""The policy alone: a run of ten thousand groups in virtual time, a failure every second.

Agents die, connections break, events come late, twice and out of order, the controller is killed and paused; the
invariants are checked after each decision (`tests/support/simulation.py`), and what is timed is the decisions.
"""

from __future__ import annotations

import os
import statistics
import time

from benches.report import emit
from tests.support.simulation import Simulation

GROUPS = int(os.environ.get("SKY_MONARCH_BENCH_GROUPS", "10000"))
SECONDS = int(os.environ.get("SKY_MONARCH_BENCH_SECONDS", "600"))
TURNS = int(os.environ.get("SKY_MONARCH_BENCH_TURNS", "3"))
_GROUPS_A_HOST = 8


def run() -> None:
    """Simulate a few runs with seeds of their own, and print what their decisions cost."""
    rates: list[float] = []
    starts: list[float] = []
    failures: dict[str, int] = {}
    decisions, walls = 0, 0.0
    load = f"{GROUPS} groups on {GROUPS // _GROUPS_A_HOST} hosts, {SECONDS} virtual s, a failure each"
    for seed in range(TURNS):
        since = time.monotonic()
        world = Simulation(GROUPS, hosts=GROUPS // _GROUPS_A_HOST, seed=seed)
        world.run(10)
        starts.append(world.decisions / world.deciding_s)
        world.decisions, world.deciding_s = 0, 0.0
        world.fail_every_second(SECONDS)
        world.run(SECONDS + 60)
        world.check_all()
        if world.state.phase.ended:
            raise RuntimeError(f"seed {seed}: the run ended: {world.state.reason}")
        rates.append(world.decisions / world.deciding_s)
        decisions += world.decisions
        walls += time.monotonic() - since
        for kind, count in world.failures.items():
            failures[kind] = failures.get(kind, 0) + count
    emit("sky-monarch", "policy_decisions", statistics.median(rates), "1/s", load=load)
    emit("sky-monarch", "policy_decisions_at_start", statistics.median(starts), "1/s", load=load)
    emit("sky-monarch", "policy_decisions_checked", decisions, "count", load=load)
    for kind, count in sorted(failures.items()):
        emit("sky-monarch", f"policy_failures_{kind}", count, "count", load=load)
    emit("sky-monarch", "policy_simulation", walls, "s", load=load)
