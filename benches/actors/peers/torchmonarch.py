"""Monarch: `torchmonarch` of PyPI, with its defaults but for how long it waits for a start."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from benches.actors.peers.echo import Echo
from benches.actors.peers.peer import HANG_S

# Not a matter of speed: on a busy machine 32 processes take longer than its defaults, 30 s.
os.environ.update(HYPERACTOR_HOST_SPAWN_READY_TIMEOUT="120s", HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE="120s")

import monarch.actor
from monarch.actor import Actor, endpoint, shutdown_context, this_host

_STOP_S = 30.0


class MonarchEcho(Actor):
    """Endpoints around `Echo`: plain ones, which cost Monarch a tenth less than coroutines."""

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
    def __init__(self, processes: int) -> None:
        self.procs = this_host().spawn_procs({"i": processes})
        self.actors = self.procs.spawn("echo", MonarchEcho)
        self.first = self.actors.slice(i=0)
        self.processes = processes


class Monarch:
    """See `Peer`."""

    def version(self) -> str:
        return version("torchmonarch")

    def start(self) -> None:
        # Else the first death would end this process.
        monarch.actor.unhandled_fault_hook = lambda _failure: None
        this_host().initialized.get()

    def spawn(self, processes: int) -> _Mesh:
        return _Mesh(processes)

    def spawn_over(self, transport: str, processes: int) -> Any:
        raise NotImplementedError(f"not measured over {transport}")

    def pids(self, mesh: _Mesh) -> list[int]:
        return [pid for _, pid in mesh.actors.pid.call().get()]

    def call(self, mesh: _Mesh, value: Any) -> Any:
        return mesh.first.ping.call_one(value).get()

    def send(self, mesh: _Mesh, messages: int) -> int:
        bump = mesh.first.bump
        for _ in range(messages):
            bump.broadcast()
        return int(mesh.first.count.call_one().get())

    def pipeline(self, mesh: _Mesh, calls: int, window: int) -> None:
        ping = mesh.first.ping
        waiting: deque[Any] = deque()
        for number in range(calls):
            future = ping.call_one(number)
            future._as_handle()  # sends it; without, that is put off until somebody waits
            waiting.append(future)
            if len(waiting) == window:
                waiting.popleft().get()
        for future in waiting:
            future.get()

    def gather(self, mesh: _Mesh) -> int:
        return len(mesh.actors.ping.call(1).get())

    def echo(self, mesh: _Mesh, payload: Any) -> Any:
        return mesh.first.ping.call_one(payload).get()

    def sink(self, mesh: _Mesh, payload: Any) -> int:
        return int(mesh.first.length.call_one(payload).get())

    def losable(self, processes: int) -> _Mesh:
        return self.spawn(processes)

    def pend(self, mesh: _Mesh, rank: int) -> Callable[[], None]:
        future = mesh.actors.slice(i=rank).hang.call_one(HANG_S)
        future._as_handle()
        return lambda: future.get()

    def recover(self, mesh: _Mesh, ranks: Sequence[int]) -> tuple[_Mesh, dict[int, float]]:
        # No rank comes back into its mesh: whole-mesh calls work again with a new one.
        again = _Mesh(mesh.processes)
        self.pids(again)
        answered_s = time.monotonic()
        return again, dict.fromkeys(ranks, answered_s)

    def stop(self, mesh: _Mesh) -> None:
        try:
            mesh.procs.stop().get(timeout=_STOP_S)
        except Exception as error:  # noqa: BLE001 - of a mesh with dead processes it fails
            print(f"stop: {error!r:.300}")

    def close(self) -> None:
        shutdown_context().get(timeout=_STOP_S)


PEER = Monarch
