"""A rank dies in the middle of the work: it comes back in its place, and the work goes on.

    python examples/actors/lose_a_rank.py [--ranks 4] [--steps 40] [--die-at 25]

Each rank adds up numbers of its own, in memory. The script keeps what they have every few steps. When a rank is killed,
the call that needed it fails at once and says which; the script has it respawned in the same mesh, and takes all ranks
back to what was kept.
"""

import argparse
import os
import signal
import time

from sky_monarch.actor import Actor, SupervisionError, current_rank, current_size, endpoint, this_host

KEEP_EVERY = 10
NUMBERS = 1000


class Adder(Actor):
    """Adds up each number below ``steps * NUMBERS`` that is its own."""

    def __init__(self) -> None:
        self.total = 0

    @endpoint
    def add(self, step: int) -> int:
        """Add the numbers of a step; returns the total so far."""
        rank, ranks = current_rank().rank, current_size()["ranks"]
        self.total += sum(range(step * NUMBERS + rank, (step + 1) * NUMBERS, ranks))
        return self.total

    @endpoint
    def load(self, total: int) -> None:
        """Go on from there."""
        self.total = total

    @endpoint
    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


def work(ranks: int, steps: int, die_at: int) -> tuple[int, int, float]:
    """Do all steps, and lose a rank before one of them.

    Returns:
        The sum over all ranks, how many steps were done again, and the seconds from the death to the next step that all
        ranks had done.
    """
    procs = this_host().spawn_procs(per_host={"ranks": ranks})
    adders = procs.spawn("adders", Adder)
    pids = adders.pid.call().get(timeout=30)
    kept, kept_step = {point: 0 for point, _ in pids.items()}, 0
    killed_s, away_s, again = 0.0, 0.0, 0
    step = 0
    while step < steps:
        if step == die_at and not killed_s:
            killed_s = time.monotonic()
            os.kill(pids.get(ranks - 1), signal.SIGKILL)
        try:
            totals = adders.add.call(step).get(timeout=30)
        except SupervisionError as error:
            print(f"step {step}: {error}")
            adders.respawn(ranks - 1)
            for point, total in kept.items():
                adders.slice(**point).load.call_one(total).get(timeout=30)
            again += step - kept_step
            step = kept_step
            continue
        if killed_s and not away_s:
            away_s = time.monotonic() - killed_s
        step += 1
        if step % KEEP_EVERY == 0:
            kept, kept_step = dict(totals.items()), step
    total = sum(totals.values())
    procs.stop().get(timeout=30)
    return total, again, away_s


def main() -> None:
    """Work, and say what was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--die-at", type=int, default=25)
    options = parser.parse_args()
    total, again, away_s = work(options.ranks, options.steps, options.die_at)
    right = sum(range(options.steps * NUMBERS))
    print(f"the sum is {total}, {'as it should be' if total == right else f'and should be {right}'}")
    print(f"{again} steps were done again; the whole mesh answered {away_s * 1000:.0f} ms after the death")


if __name__ == "__main__":
    main()
