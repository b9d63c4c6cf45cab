"""Ray: one actor in each worker process, on a cluster of its own on this host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from benches.actors.peers.echo import Echo
from benches.actors.peers.peer import HANG_S

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

import ray

_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
_OBJECT_STORE_BYTES = 1 << 30
_RECOVER_S = 60.0
_STARTS = 3


class Ray:
    """See `Peer`."""

    def version(self) -> str:
        return str(ray.__version__)

    def start(self) -> None:
        _raise_loopback()
        for attempt in range(1, _STARTS + 1):
            try:
                self._start()
                break
            except Exception:  # its own limits are short for a busy machine
                if attempt == _STARTS:
                    raise
                ray.shutdown()
                time.sleep(attempt)
        # No CPU reserved, so a mesh may have more processes than there are cores.
        self._actor = ray.remote(num_cpus=0)(Echo)

    def _start(self) -> None:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=tempfile.mkdtemp(prefix="r"),  # a short name: there will be sockets in it
        )

    def spawn(self, processes: int, **options: Any) -> list[Any]:
        return [self._actor.options(**options).remote() for _ in range(processes)]

    def spawn_over(self, transport: str, processes: int) -> Any:
        raise NotImplementedError(f"not measured over {transport}")

    def pids(self, mesh: list[Any]) -> list[int]:
        return list(ray.get([actor.pid.remote() for actor in mesh]))

    def call(self, mesh: list[Any], value: Any) -> Any:
        return ray.get(mesh[0].ping.remote(value))

    def send(self, mesh: list[Any], messages: int) -> int:
        bump = mesh[0].bump
        for _ in range(messages):
            bump.remote()
        return int(ray.get(mesh[0].count.remote()))

    def pipeline(self, mesh: list[Any], calls: int, window: int) -> None:
        ping = mesh[0].ping
        waiting: deque[Any] = deque()
        for number in range(calls):
            waiting.append(ping.remote(number))
            if len(waiting) == window:
                ray.get(waiting.popleft())
        ray.get(list(waiting))

    def gather(self, mesh: list[Any]) -> int:
        return len(ray.get([actor.ping.remote(1) for actor in mesh]))

    def echo(self, mesh: list[Any], payload: Any) -> Any:
        return ray.get(mesh[0].ping.remote(payload))

    def sink(self, mesh: list[Any], payload: Any) -> int:
        return int(ray.get(mesh[0].length.remote(payload)))

    def losable(self, processes: int) -> list[Any]:
        return self.spawn(processes, max_restarts=-1)

    def pend(self, mesh: list[Any], rank: int) -> Callable[[], None]:
        pending = mesh[rank].hang.remote(HANG_S)
        return lambda: ray.get(pending)

    def recover(self, mesh: list[Any], ranks: Sequence[int]) -> tuple[list[Any], dict[int, float]]:
        answered_s: dict[int, float] = {}
        deadline_s = time.monotonic() + _RECOVER_S
        while len(answered_s) < len(ranks):
            for rank in set(ranks) - answered_s.keys():
                try:
                    ray.get(mesh[rank].pid.remote(), timeout=_RECOVER_S)
                    answered_s[rank] = time.monotonic()
                except ray.exceptions.RayActorError:  # it is being restarted
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.005)
        return mesh, answered_s

    def stop(self, mesh: list[Any]) -> None:
        for actor in mesh:
            ray.kill(actor)
        time.sleep(0.5)  # it does not say when they are gone

    def close(self) -> None:
        ray.shutdown()


def _raise_loopback() -> None:
    """In a network of its own, loopback is down at first; in any other this changes nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP_RUNNING))
        except PermissionError:  # not ours to change, hence not in a network of its own
            return


PEER = Ray
