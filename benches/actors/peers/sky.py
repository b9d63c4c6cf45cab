"""Ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from benches.actors.peers.echo import Echo
from benches.actors.peers.peer import HANG_S
from sky_monarch.actor import Actor, ProcMesh, endpoint, local_hosts, shutdown, this_host

_STOP_S = 30.0
_HOSTS = 2


class SkyEcho(Actor):
    """Endpoints around `Echo`."""

    def __init__(self) -> None:
        self._echo = Echo()

    @endpoint
    def ping(self, value: Any) -> Any:
        return value

    @endpoint
    def bump(self) -> None:
        self._echo.bump()

    @endpoint
    def count(self) -> int:
        return self._echo.count()

    @endpoint
    def pid(self) -> int:
        return self._echo.pid()

    @endpoint
    def length(self, payload: Any) -> int:
        return self._echo.length(payload)

    @endpoint
    def hang(self, seconds: float) -> None:
        self._echo.hang(seconds)


class _Mesh:
    def __init__(self, procs: ProcMesh) -> None:
        self.procs = procs
        self.actors = procs.spawn("echo", SkyEcho)
        self.first = self.actors.slice(i=0)


class SkyMonarch:
    """See `Peer`."""

    def version(self) -> str:
        return version("sky-monarch")

    def start(self) -> None:
        this_host()

    def spawn(self, processes: int, standby: int = 0) -> _Mesh:
        return _Mesh(this_host().spawn_procs({"i": processes}, standby=standby))

    def spawn_over(self, transport: str, processes: int) -> _Mesh:
        if transport != "tls":
            raise ValueError(f"hosts are reached over tls, not over {transport}")
        hosts = local_hosts(_HOSTS)
        return _Mesh(hosts.spawn_procs({"each": processes // _HOSTS}).flatten("i"))

    def pids(self, mesh: _Mesh) -> list[int]:
        return list(mesh.actors.pid.call().get().values())

    def call(self, mesh: _Mesh, value: Any) -> Any:
        return mesh.first.ping.call_one(value).get()

    def send(self, mesh: _Mesh, messages: int) -> int:
        bump = mesh.first.bump
        for _ in range(messages):
            bump.broadcast()
        return mesh.first.count.call_one().get()

    def pipeline(self, mesh: _Mesh, calls: int, window: int) -> None:
        ping = mesh.first.ping
        waiting: deque[Any] = deque()
        for number in range(calls):
            waiting.append(ping.call_one(number))
            if len(waiting) == window:
                waiting.popleft().get()
        for future in waiting:
            future.get()

    def gather(self, mesh: _Mesh) -> int:
        return len(mesh.actors.ping.call(1).get())

    def echo(self, mesh: _Mesh, payload: Any) -> Any:
        return mesh.first.ping.call_one(payload).get()

    def sink(self, mesh: _Mesh, payload: Any) -> int:
        return mesh.first.length.call_one(payload).get()

    def losable(self, processes: int) -> _Mesh:
        return self.spawn(processes, standby=processes)

    def pend(self, mesh: _Mesh, rank: int) -> Callable[[], None]:
        future = mesh.actors.slice(i=rank).hang.call_one(HANG_S)
        return lambda: future.get()

    def recover(self, mesh: _Mesh, ranks: Sequence[int]) -> tuple[_Mesh, dict[int, float]]:
        mesh.procs.respawn(ranks)
        answers = {rank: mesh.actors.slice(i=rank).pid.call_one() for rank in ranks}
        answered_s = {}
        for rank, answer in answers.items():
            answer.get()
            answered_s[rank] = time.monotonic()
        return mesh, answered_s

    def stop(self, mesh: _Mesh) -> None:
        mesh.procs.stop().get(timeout=_STOP_S)

    def close(self) -> None:
        shutdown()


PEER = SkyMonarch
