"""Actors for tests. Importable, as those of a program's own modules are."""

from __future__ import annotations

import asyncio
import os
import resource
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


def wait_for(path: str) -> None:
    """Wait until there is such a file."""
    end = time.monotonic() + 3 * LIMIT_S
    while not Path(path).exists():
        assert time.monotonic() < end, f"nobody has made {path}"
        time.sleep(0.005)


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
    def stay_until(self, path: str) -> None:
        """Stay until there is such a file."""
        wait_for(path)

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
        self.hanging = 0
        self.release = asyncio.Event()

    @endpoint
    async def alone(self, s: float) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(s)
        self.running -= 1
        return self.most

    @concurrent_endpoint
    async def together(self, count: int) -> int:
        """Stay until so many are here at a time."""
        self.running += 1
        self.most = max(self.most, self.running)
        async with asyncio.timeout(LIMIT_S):
            while self.most < count:
                await asyncio.sleep(0.005)
        self.running -= 1
        return self.most

    @endpoint
    async def hold(self) -> str:
        """Stay until it is let go."""
        await self.release.wait()
        return "let go"

    @concurrent_endpoint
    async def let_go(self) -> None:
        self.release.set()

    @endpoint(concurrent=True)
    def status(self) -> str:
        return "here"

    @concurrent_endpoint
    async def hangs(self) -> bool:
        """Whether one is in :meth:`hang`."""
        return self.hanging > 0

    @endpoint
    async def hang(self) -> None:
        self.hanging += 1
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


class Spoken(Caller):
    """The same, and says who it is and what it has heard."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    @endpoint(concurrent=True)
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def ask_all(self, mesh: Any) -> list[int]:
        answers: Any = mesh.pid.call()
        return list((await answers).values())

    @endpoint
    def hear(self, value: Any) -> None:
        self.heard.append(value)

    @endpoint
    def all_heard(self) -> list[Any]:
        return self.heard


class PeculiarError(Exception):
    """Whose own code fails, in the ways that are worst."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how

    def __str__(self) -> str:
        if self.how == "str":
            raise KeyboardInterrupt("in __str__")
        return self.how

    def __reduce__(self) -> Any:
        if self.how == "reduce":
            sys.exit(3)
        return dict, () if self.how == "other" else ((),)


class Troubled(Actor):
    """Fails in ways that must not end it, nor leave its caller waiting."""

    @endpoint
    def fail(self, how: str) -> None:
        raise PeculiarError(how)

    @endpoint
    def fail_from(self, is_cause: bool) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            if is_cause:
                raise ValueError("outer") from error
            raise ValueError("outer")  # noqa: B904

    @endpoint
    def answer_without_files(self) -> bytes:
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, self.limits[1]))
        return bytes(1 << 20)

    @endpoint
    def work(self) -> str:
        if hasattr(self, "limits"):
            resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)
        return "done"


class TroubledLater(Troubled):
    """The same on a loop."""

    @endpoint
    async def answer_without_files_later(self) -> bytes:
        return self.answer_without_files()


class Mixed(Actor):
    """Functions and coroutines, and what they may wait for."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.loop: Any = None
        self.released = threading.Event()

    @endpoint
    def run_loop(self) -> int:
        async def later() -> int:
            await asyncio.sleep(0.01)
            return 5

        return asyncio.run(later())

    @endpoint
    async def nothing(self) -> None:
        self.loop = asyncio.get_running_loop()

    @concurrent_endpoint
    async def aside(self) -> str:
        return "aside"

    @endpoint
    async def await_itself(self, mesh: Any) -> None:
        await mesh.nothing.call_one()

    @endpoint
    async def await_aside(self, mesh: Any) -> str:
        return await mesh.aside.call_one()

    @concurrent_endpoint
    async def await_other(self, mesh: Any) -> None:
        await mesh.nothing.call_one()

    @endpoint
    def run_awaiting(self, mesh: Any) -> None:
        async def awaiting() -> None:
            await mesh.aside.call_one()

        asyncio.run(awaiting())

    @endpoint(concurrent=True)
    def wait_for_release(self) -> bool:
        return self.released.wait(LIMIT_S)

    @endpoint(concurrent=True)
    def release(self) -> None:
        self.released.set()

    @endpoint
    async def boom(self) -> None:
        raise ValueError("no")

    async def __cleanup__(self, error: BaseException | None) -> None:
        same = asyncio.get_running_loop() is self.loop
        Path(self.path).write_text(f"{error!r} {same}", encoding="utf-8")


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

    def __init__(self, handles: bool | None = True) -> None:
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
        if self.handles is None:
            sys.exit(3)
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
    async def make_in(self, s: float) -> list[int]:
        await asyncio.sleep(s)
        return [current_rank().rank]

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
    def flood(self, port: Any, n: int) -> int:
        for number in range(n):
            port.send(number)
        return n

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
