"""Two processes that play a ball to and fro.

    python examples/actors/ping_pong.py [--hits 1000]

One script, three processes: this one starts two more, each with a player in it, and calls their methods.
"""

import argparse
import os
import time

from sky_monarch.actor import Actor, current_rank, endpoint, this_host


class Player(Actor):
    """Hits the ball.

    Args:
        words: What the players say, by rank.
    """

    def __init__(self, words: list[str]) -> None:
        self.word = words[current_rank().rank]

    @endpoint
    def hit(self, ball: int) -> tuple[int, str, int]:
        """Return the ball one further, with a word and the process that says it."""
        return ball + 1, self.word, os.getpid()


def play(hits: int) -> tuple[int, set[int]]:
    """Play that many hits; returns the ball, and the processes that hit it."""
    procs = this_host().spawn_procs(per_host={"players": 2})
    players = procs.spawn("players", Player, ["ping", "pong"])
    sides = [players.slice(players=0), players.slice(players=1)]
    ball, pids = 0, set()
    for number in range(hits):
        ball, word, pid = sides[number % 2].hit.call_one(ball).get(timeout=30)
        pids.add(pid)
        if number < 4:
            print(word)
    procs.stop().get(timeout=30)
    return ball, pids


def main() -> None:
    """Play, and say how long a hit took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hits", type=int, default=1000)
    hits = parser.parse_args().hits
    begun = time.perf_counter()
    ball, pids = play(hits)
    each_us = (time.perf_counter() - begun) / hits * 1e6
    print(f"{ball} hits by {len(pids)} processes, {each_us:.0f} us each with the start")


if __name__ == "__main__":
    main()
