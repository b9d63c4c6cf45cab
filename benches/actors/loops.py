"""The timed loops, in the peer's own process: the same for all, so that what differs is the runtime."""

from __future__ import annotations

import math
import os
import random
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benches.actors.peers.peer import Peer

MIB = 1 << 20
PROCESSES = 8
WINDOW = 100
PAYLOAD_MIB = 64
#: Who has not been told of a death by then counts with this time, and as one who was not told.
DEATH_LIMIT_S = 35.0
_LOOK_EVERY_S = 0.0005
_ALL_S = 0.5

#: What a loop returns: figures by name, the operations that the processor time is of among them ("operations").
Sample = dict[str, Any]
#: The timed part; what comes before it was preparation.
Timed = Callable[[], Sample]


class Loops:
    """Prepares each figure and times it. The meshes that carry messages stay up from figure to figure.

    Args:
        peer: Started.
        seconds: About how long a timed loop goes on.
    """

    def __init__(self, peer: Peer, seconds: float) -> None:
        self._peer = peer
        self._seconds = seconds
        #: By how its processes are reached, and how many there are.
        self._meshes: dict[tuple[str, int], Any] = {}
        self._losable: dict[int, Any] = {}
        self._left: list[Any] = []
        self._random = random.Random(0)  # spreads deaths over the phase of any timer

    def prepare(self, figure: str, **options: Any) -> Timed:
        """Do what is not timed; returns what is."""
        timed: Timed = getattr(self, f"_{figure}")(**options)
        return timed

    def settle(self) -> None:
        """End what the last figure has started and nobody needs any more."""
        while self._left:
            self._peer.stop(self._left.pop())

    def _mesh(self, processes: int, over: str = "") -> Any:
        if (over, processes) not in self._meshes:
            mesh = self._peer.spawn_over(over, processes) if over else self._peer.spawn(processes)
            self._peer.pids(mesh)
            self._meshes[over, processes] = mesh
        return self._meshes[over, processes]

    def _repeated(self, operation: Callable[[], None], *, limit: int = 20_000) -> Timed:
        """Warm up with some; then time each one for about the seconds of a loop."""
        for _ in range(20):
            operation()
        begun = time.perf_counter()
        for _ in range(20):
            operation()
        each_s = (time.perf_counter() - begun) / 20
        number = max(20, min(limit, round(self._seconds / each_s)))
        walls_s: list[float] = []

        def timed() -> Sample:
            clock = time.perf_counter
            for _ in range(number):
                at = clock()
                operation()
                walls_s.append(clock() - at)
            return {"operations": number, **_distribution(walls_s)}

        return timed

    def _rtt_call(self, over: str = "") -> Timed:
        mesh, call = self._mesh(PROCESSES if over else 1, over), self._peer.call
        return self._repeated(lambda: _same(call(mesh, 1), 1))

    def _fanout(self, over: str = "") -> Timed:
        mesh, gather = self._mesh(PROCESSES, over), self._peer.gather
        return self._repeated(lambda: _same(gather(mesh), PROCESSES))

    def _msgs(self) -> Timed:
        mesh = self._mesh(1)
        arrived = self._peer.send(mesh, 0)

        def send(number: int) -> None:
            nonlocal arrived
            arrived += number
            _same(self._peer.send(mesh, number), arrived)

        return self._bulk(send)

    def _pipelined_calls(self) -> Timed:
        mesh = self._mesh(1)
        return self._bulk(lambda number: self._peer.pipeline(mesh, number, WINDOW))

    def _bulk(self, operations: Callable[[int], None]) -> Timed:
        """Find how many fill the time; then time so many at once."""
        warm_up = 500
        operations(warm_up)
        begun = time.perf_counter()
        operations(warm_up)
        number = round(warm_up * self._seconds / (time.perf_counter() - begun))
        number = max(warm_up, min(100_000, number))

        def timed() -> Sample:
            at = time.perf_counter()
            operations(number)
            wall_s = time.perf_counter() - at
            return {"operations": number, "wall_s": wall_s}

        return timed

    def _spawn_mesh(self, processes: int = PROCESSES) -> Timed:
        def timed() -> Sample:
            at = time.perf_counter()
            mesh = self._peer.spawn(processes)
            pids = self._peer.pids(mesh)
            wall_s = time.perf_counter() - at
            self._left.append(mesh)
            if len(set(pids)) != processes or os.getpid() in pids:
                raise RuntimeError(f"{processes} processes were asked for, there are {sorted(set(pids))}")
            return {"operations": 1, "wall_s": wall_s, "pids": pids}

        return timed

    def _payload(self, kind: str, way: str, over: str = "", repeats: int = 5) -> Timed:
        mesh = self._mesh(PROCESSES if over else 1, over)
        payload = _payload_of(kind)
        size = len(payload)

        def there() -> None:
            _same(self._peer.sink(mesh, payload), size)

        def and_back() -> None:
            back = self._peer.echo(mesh, payload)
            _same((type(back), len(back), _end_of(back)), (type(payload), size, _end_of(payload)))

        operation = there if way == "oneway" else and_back
        operation()

        def timed() -> Sample:
            walls_s = []
            for _ in range(repeats):
                at = time.perf_counter()
                operation()
                walls_s.append(time.perf_counter() - at)
            carried = size * (1 if way == "oneway" else 2)
            return {"operations": repeats, "GBps": carried / statistics.median(walls_s) / 1e9}

        return timed

    def _deaths(self, at_once: int, settle_s: float) -> Timed:
        """Kill actors with a call pending in each, and replace them."""
        if at_once not in self._losable:
            self._losable[at_once] = self._peer.losable(max(2, at_once))
        mesh = self._losable[at_once]
        pids = self._peer.pids(mesh)
        ranks = list(range(len(pids)))[-at_once:]
        pending = {rank: _Pending(self._peer.pend(mesh, rank)) for rank in ranks}
        ends = _Ends([pids[rank] for rank in ranks])
        # A call is on its way by then, and a poll somewhere in between.
        time.sleep(0.2 + self._random.random() * settle_s)

        def timed() -> Sample:
            killed_s = {}
            for rank in ranks:
                killed_s[rank] = time.monotonic()
                os.kill(pids[rank], signal.SIGKILL)
            limit_s = time.monotonic() + DEATH_LIMIT_S
            while not any(each.raised_s for each in pending.values()) and time.monotonic() < limit_s:
                time.sleep(_LOOK_EVERY_S)
            # Who is told of one death replaces all that are dead by then: it does not wait for a call that stalls.
            soon_s = time.monotonic() + _ALL_S
            for each in pending.values():
                each.wait_until(soon_s)
            again, answered_s = self._peer.recover(mesh, ranks)
            self._losable[at_once] = again
            if again is not mesh:
                self._left.append(mesh)
            for each in pending.values():
                each.wait_until(limit_s)
            raised_s = {rank: each.raised_s or math.inf for rank, each in pending.items()}
            detect_ms = [min(raised_s[rank] - killed_s[rank], DEATH_LIMIT_S) * 1e3 for rank in ranks]
            ended_s = ends.wait_until(limit_s)
            return {
                "operations": len(ranks),
                "detect_ms": detect_ms,
                "ended_ms": [
                    (ended_s[pids[rank]] - killed_s[rank]) * 1e3 for rank in ranks if pids[rank] in ended_s
                ],
                "undetected": sum(each.raised_s is None for each in pending.values()),
                "recover_ms": [(answered_s[rank] - killed_s[rank]) * 1e3 for rank in ranks],
                "errors": sorted({each.error for each in pending.values()}),
            }

        return timed


class _Ends:
    """When the kernel says that a process has ended: none that it works with can know sooner.

    Args:
        pids: Alive.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._ended_s: dict[int, float] = {}
        self._left = {os.pidfd_open(pid): pid for pid in pids}
        self._poll = select.poll()
        for fd in self._left:
            self._poll.register(fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._left:
            for fd, _ in self._poll.poll():
                self._ended_s[self._left.pop(fd)] = time.monotonic()
                self._poll.unregister(fd)
                os.close(fd)

    def wait_until(self, deadline_s: float) -> dict[int, float]:
        """The times by pid, of those that have ended by then (monotonic, seconds)."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return dict(self._ended_s)


@dataclass(slots=True)
class _Pending:
    """A call that waits for the death of its actor, on a thread of its own.

    Args:
        wait: Of `Peer.pend`.
    """

    wait: Callable[[], None]
    raised_s: float | None = None
    error: str = ""
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - each runtime has its own
            self.raised_s, self.error = time.monotonic(), type(error).__name__

    def wait_until(self, deadline_s: float) -> None:
        """Wait for it to raise, but not longer than until then (monotonic, seconds)."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))


def _payload_of(kind: str) -> Any:
    import numpy as np

    array = np.random.default_rng(0).integers(0, 255, PAYLOAD_MIB * MIB, dtype=np.uint8)
    if kind == "tensor":
        import torch

        return torch.from_numpy(array)
    return array if kind == "numpy" else array.tobytes()


def _end_of(payload: Any) -> list[int]:
    return [int(each) for each in payload[-64:]]


def _distribution(walls_s: list[float]) -> Sample:
    ordered = sorted(walls_s)
    return {
        "p50_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
        "min_us": ordered[0] * 1e6,
    }


def _same(found: Any, expected: Any) -> None:
    if found != expected:
        raise RuntimeError(f"a runtime answered {found!r:.100} instead of {expected!r:.100}")
