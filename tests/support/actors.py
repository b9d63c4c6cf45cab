"""Actors for tests. Importable, as those of a program's own modules are."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sky_monarch.actor import (
    Actor,
    MeshFailure,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    current_size,
    endpoint,
    this_host,
)

LIMIT_S = 20


class Echo(Actor):
    """Says what it is told."""

    def __init__(self, greeting: str = "") -> None:
        self.greeting = greeting
        self.heard: list[Any] = []

    @endpoint
    def echo(self, value: Any) -> Any:
        """Give ``value`` back."""
        return value

    @endpoint
    async def echo_later(self, value: Any, after_s: float = 0.0) -> Any:
        await asyncio.sleep(after_s)
        return value

    @endpoint
    def hear(self, value: Any) -> None:
        self.heard.append(value)

    @endpoint
    def all_heard(self) -> list[Any]:
        return self.heard

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def where(self) -> tuple[int, dict[str, int], dict[str, int]]:
        return current_rank().rank, dict(current_rank()), current_size()

    @endpoint
    def boom(self, words: str = "no") -> None:
        raise ValueError(words)

    @endpoint
    def say_and_die(self, words: str, code: int = 3) -> None:
        print(words)
        sys.stderr.write(words + " on stderr\n")
        os._exit(code)


class Plain(Actor):
    """Only functions: served without an event loop."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.running = 0
        self.most = 0

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def hear(self, value: Any) -> None:
        self.heard.append(value)

    @endpoint
    def all_heard(self) -> list[Any]:
        return self.heard

    @endpoint
    def total(self, array: Any) -> float:
        return float(array.sum())

    @endpoint
    def alone(self, s: float = 0.0) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(s)
        self.running -= 1
        return self.most

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def resources(self) -> tuple[int, int]:
        """Open files and threads."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


class Busy(Actor):
    """Serial and concurrent endpoints in one."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.release = asyncio.Event()

    async def _stay(self, s: float) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(s)
        self.running -= 1
        return self.most

    @endpoint
    async def alone(self, s: float) -> int:
        return await self._stay(s)

    @concurrent_endpoint
    async def together(self, s: float) -> int:
        return await self._stay(s)

    @endpoint(concurrent=True)
    def status(self) -> str:
        return "here"

    @endpoint
    async def hang(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    @endpoint
    async def cancellations(self) -> int:
        return self.cancelled


class Caller(Actor):
    """Calls others, and itself."""

    @endpoint
    def ask(self, mesh: Any, value: Any) -> Any:
        return mesh.echo.call_one(value).get(10)

    @endpoint
    async def ask_awaiting(self, mesh: Any, value: Any) -> Any:
        return await mesh.echo.call_one(value)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def stay(self, s: float, fails: int) -> None:
        if current_rank().rank == fails:
            raise ValueError("this rank fails")
        await asyncio.sleep(s)


class Teller(Actor):
    """Sends messages without an answer, until it is told that nobody hears them."""

    @endpoint
    def tell(self, mesh: Any, times: int) -> str:
        for _ in range(times):
            try:
                mesh.hear.broadcast("anybody there?")
            except SupervisionError as error:
                return str(error)
            time.sleep(0.01)
        return ""


class Narcissus(Actor):
    """Waits for itself."""

    @endpoint
    def look(self, mesh: Any) -> Any:
        return mesh.echo.call_one(1).get(10)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Owner(Actor):
    """Spawns processes and is told of their ends."""

    def __init__(self, handles: bool = True) -> None:
        self.handles = handles
        self.failures: list[tuple[float, MeshFailure]] = []

    @endpoint
    def start(self, n: int) -> list[int]:
        self.procs = this_host().spawn_procs({"gpus": n}, name="kids")
        self.kids = self.procs.spawn("kid", Echo)
        return list(self.kids.pid.call().get(30).values())

    @endpoint
    def told(self) -> list[tuple[float, MeshFailure]]:
        return self.failures

    @endpoint
    def bring_back(self, rank: int) -> None:
        self.kids.respawn(rank)

    @endpoint
    def all_pids(self) -> list[int]:
        return list(self.kids.pid.call().get(30).values())

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append((time.monotonic(), failure))
        return self.handles


class FarOwner(Owner):
    """The same on hosts that it is given."""

    @endpoint
    def start(self, hosts: Any, n: int) -> list[int]:
        self.procs = hosts.spawn_procs({"gpus": n}, name="kids")
        self.kids = self.procs.spawn("kid", Echo)
        return list(self.kids.pid.call().get(30).values())

    @endpoint
    def bring_back_on(self, ranks: list[int], host: Any) -> None:
        self.kids.respawn(ranks, host=host)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Branch(Actor):
    """Spawns others like it, level upon level, each on the next one of the hosts."""

    def __init__(self) -> None:
        self.told: list[MeshFailure] = []

    @endpoint
    def grow(self, hosts: Any, levels: int) -> list[int]:
        """Pids of all levels, this one first."""
        if levels == 1:
            return [os.getpid()]
        procs = hosts.slice(hosts=(levels + 1) % len(hosts)).spawn_procs(name=f"level{levels - 1}")
        self.next = procs.spawn("branch", Branch)
        return [os.getpid(), *self.next.grow.call_one(hosts, levels - 1).get(60)]

    @endpoint
    def all_told(self) -> list[list[str]]:
        """The meshes of which each level was told that they have failed."""
        below = self.next.all_told.call_one().get(30) if hasattr(self, "next") and not self.told else []
        return [[failure.mesh_name for failure in self.told], *below]

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        return False


class Maker(Actor):
    """Makes lists of its own rank, and looks at what it is given."""

    @endpoint
    def make(self, n: int) -> list[int]:
        if n < 0:
            raise ValueError("nothing can be made")
        return [current_rank().rank] * n

    @endpoint
    async def make_later(self, n: int) -> list[int]:
        await asyncio.sleep(0.05)
        return [current_rank().rank] * n

    @endpoint
    def describe(self, value: Any) -> tuple[str, Any]:
        return type(value).__name__, value[0] if isinstance(value, list) else None

    @endpoint
    def fetch(self, value: Any) -> Any:
        return next(iter(value.get(10).values()))


class Counter(Actor):
    """Sends numbers to a port."""

    @endpoint
    def count_to(self, port: Any, n: int) -> None:
        for number in range(n):
            port.send(number)
        port.exception(StopIteration("that is all"))

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class Careful(Actor):
    """Leaves a mark when it is made and when it ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mark("made")

    def mark(self, word: str) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(word + "\n")

    @endpoint
    def work(self) -> str:
        return "done"

    def __cleanup__(self, error: BaseException | None) -> None:
        self.mark(f"cleaned up {error!r}")


class Unmakeable(Actor):
    def __init__(self) -> None:
        raise RuntimeError("no such device")

    @endpoint
    def work(self) -> None: ...


def spawn(n: int, cls: type[Actor] = Plain, **options: Any) -> tuple[Any, Any, list[int]]:
    """``n`` processes named ``trainers`` with an actor ``trainer`` in each; procs, mesh and their pids."""
    procs = this_host().spawn_procs({"gpus": n}, name="trainers", **options)
    mesh = procs.spawn("trainer", cls)
    return procs, mesh, list(mesh.pid.call().get(LIMIT_S).values())
