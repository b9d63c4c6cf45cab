"""One program on several hosts: each rank throws darts, the ranks of a host add up among themselves.

    python examples/actors/two_hosts.py [--hosts 2] [--gpus 2]

The hosts are processes of this machine (``local_hosts``), which talk over TLS as they would over a network. On machines
of your own run ``sky-monarch actor-host`` there, and put ``attach_to_hosts([...])`` in the place of ``local_hosts``:
nothing else changes. Half-way one rank is killed, and comes back on its host.
"""

import argparse
import os
import random
import signal
import socket

from sky_monarch.actor import Actor, HostMesh, SupervisionError, current_rank, endpoint, local_hosts

THROWS = 20_000


class Dart(Actor):
    """Throws darts at a square with a quarter of a circle in it.

    Args:
        seed: Of all of them; each rank throws its own.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed + current_rank().rank)

    @endpoint
    def throw(self, count: int) -> int:
        """Throw so many; returns how many were inside."""
        throw = self.random.random
        return sum(throw() ** 2 + throw() ** 2 < 1 for _ in range(count))

    @endpoint
    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


class Captain(Actor):
    """One a host: asks the players of its host, which is one message to each, and none over the network."""

    @endpoint
    def play(self, players: Dart, count: int) -> tuple[str, int]:
        """Let the players of this host throw; returns its name and how many were inside."""
        here = players.slice(hosts=current_rank()["hosts"])
        return socket.gethostname(), sum(here.throw.call(count).get(timeout=60).values())


def play(hosts: HostMesh, gpus: int, rounds: int) -> tuple[float, int]:
    """Play so many rounds and lose a player in one; returns what comes out for pi, and how many rounds were lost."""
    players = hosts.spawn_procs(per_host={"gpus": gpus}).spawn("players", Dart, seed=7)
    captains = hosts.spawn_procs().spawn("captains", Captain)
    last = len(players) - 1
    pids = players.pid.call().get(timeout=60)
    inside = thrown = lost = 0
    while thrown < rounds * THROWS * len(players):
        if thrown and not lost:
            os.kill(pids.get(last), signal.SIGKILL)  # it is of this machine
            try:
                players.throw.call(THROWS).get(timeout=60)
            except SupervisionError as error:
                print(error)
                lost += 1
                players.respawn(last)
        scores = captains.play.call(players, THROWS).get(timeout=60)
        inside += sum(score for _, score in scores.values())
        thrown += THROWS * len(players)
    return 4 * inside / thrown, lost


def main() -> None:
    """Play, and say what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    hosts = local_hosts(options.hosts)
    pi, lost = play(hosts, options.gpus, options.rounds)
    print(
        f"{', '.join(hosts.names)} x {options.gpus}: pi is about {pi:.2f}; {lost} round was lost with a rank"
    )


if __name__ == "__main__":
    main()
