"""What a call to other hosts costs: two hosts of this machine with eight processes each, over TLS on loopback.

``fanout``: one call of all sixteen, which crosses the network once a host; ``fanout_one_by_one``: sixteen calls of one,
sent together, which cross it sixteen times. CPU is that of this process and all below it, a call. The ``here`` figures
are the same on this host alone, where no gateway is in between. ``payload_oneway``: 64 MiB of numpy and an answer.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from benches.actors.tree import cpu_s
from benches.report import emit, emit_distribution
from sky_monarch.actor import Actor, endpoint, local_hosts, shutdown, this_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from sky_monarch.actor import HostMesh

_PER_HOST = 8
_ROUNDS = 300
_PAYLOADS = 10
_BYTES = 64 << 20
_LIMIT_S = 60


class Subject(Actor):
    """Answers."""

    @endpoint
    def add(self, number: int) -> int:
        """One more."""
        return number + 1

    @endpoint
    def take(self, array: Any) -> int:
        """Look at one number of a large array."""
        return int(array[-1])


def _measure(figure: str, peer: str, load: str, act: Callable[[], Any]) -> None:
    for _ in range(20):
        act()
    before_s, took_us = cpu_s(os.getpid()), []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        act()
        took_us.append((time.perf_counter() - begun) * 1e6)
    cpu_us = (cpu_s(os.getpid()) - before_s) / _ROUNDS * 1e6
    emit_distribution(peer, f"{figure}_us", took_us, "us", load=load)
    emit(peer, f"{figure}_cpu_us", cpu_us, "us", load=load)


def _measure_hosts(peer: str, hosts: HostMesh, each: int, load: str) -> None:
    import numpy as np

    mesh = hosts.spawn_procs({"gpus": each}).spawn("subject", Subject)
    ones = [mesh.slice(**point) for point, _ in mesh.add.call(0).get(_LIMIT_S).items()]

    def one_by_one() -> list[int]:
        futures = [one.add.call_one(1) for one in ones]
        return [future.get(_LIMIT_S) for future in futures]

    _measure("rtt_call", peer, load, lambda: ones[-1].add.call_one(1).get(_LIMIT_S))
    _measure("fanout", peer, load, lambda: mesh.add.call(1).get(_LIMIT_S))
    _measure("fanout_one_by_one", peer, load, one_by_one)
    array = np.ones(_BYTES // 8)
    begun = time.perf_counter()
    for _ in range(_PAYLOADS):
        ones[-1].take.call_one(array).get(_LIMIT_S)
    took_s = time.perf_counter() - begun
    emit(peer, "payload_oneway_GBps", _PAYLOADS * _BYTES / took_s / 1e9, "GB/s", load=load)


def run() -> int:
    """Measure; the exit code."""
    try:
        _measure_hosts("here", this_host(), 2 * _PER_HOST, f"1 host x {2 * _PER_HOST}")
        _measure_hosts("hosts", local_hosts(2), _PER_HOST, f"2 hosts x {_PER_HOST}")
    finally:
        shutdown()
    return 0
