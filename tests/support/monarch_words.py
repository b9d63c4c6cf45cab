"""What a program sees of meshes, in words that Monarch has too: `monarch_words.py MODULE` prints it as JSON lines.

Run once with Monarch and once with ours; it must not know which one it runs with.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import sys

face = importlib.import_module(sys.argv[1])
Actor, current_rank, current_size, endpoint = face.Actor, face.current_rank, face.current_size, face.endpoint


class Seen(Actor):
    """Tells where it is, and counts."""

    def __init__(self, count=0):
        self.count = count

    @endpoint
    def where(self):
        point = current_rank()
        return [point.rank, dict(point), current_size(), point.extent.labels, point.extent.sizes, str(point)]

    @endpoint
    def add(self, number):
        self.count += number
        return self.count

    @endpoint
    def fail(self, words):
        raise ValueError(words)


class Waiting(Actor):
    """The same in coroutines, with a mesh of others to call."""

    def __init__(self, others):
        self.others = others

    @endpoint
    async def ask(self, number):
        return list((await self.others.add.call(number)).values())


def show(name, look, *, kind=True):
    """Print what is found, or what is raised: ours may be more exact, but is caught by who catches Monarch's."""
    try:
        found = look()
    except Exception as error:  # noqa: BLE001 - which one is the question
        kinds = [each.__name__ for each in type(error).__mro__]
        found = (
            next(each for each in kinds if each == "ActorError" or hasattr(builtins, each))
            if kind
            else "Exception"
        )
        found = f"raises {found}"
    print(json.dumps({name: found}), flush=True)


def values(mesh):
    """The values alone."""
    return list(mesh.values())


async def awaited(mesh):
    one = mesh.slice(a=0, b=0)
    return values(await mesh.add.call(0)), await asyncio.gather(*(one.add.call_one(0) for _ in range(5)))


def main():
    host = face.this_host()
    show("a host's sizes", lambda: host.sizes)
    procs = host.spawn_procs(per_host={"a": 2, "b": 2})
    show(
        "sizes of processes",
        lambda: [procs.sizes, len(procs), procs.size(), procs.size("a"), str(procs.extent)],
    )
    mesh = procs.spawn("mesh", Seen, count=3)
    show("each one's place", lambda: values(mesh.where.call().get(timeout=60)))
    show("values as text", lambda: str(mesh.add.call(1).get()))
    show("keyword arguments", lambda: values(mesh.add.call(number=1).get()))
    show(
        "items", lambda: [[point.rank, dict(point), value] for point, value in mesh.add.call(0).get().items()]
    )
    show("a value by place", lambda: mesh.where.call().get().item(a=1, b=0))
    show("a value by rank", lambda: mesh.where.call().get().get(3))
    show("a part", lambda: [mesh.slice(a=1).sizes, values(mesh.slice(a=1).where.call().get())])
    show(
        "a range",
        lambda: [mesh.slice(b=slice(1, 2)).sizes, values(mesh.slice(b=slice(1, 2)).where.call().get())],
    )
    show("one", lambda: mesh.slice(a=1, b=0).where.call_one().get())
    show("one of the values", lambda: mesh.add.call(0).get().slice(a=1, b=0).item())
    show("flat", lambda: values(mesh.flatten("r").where.call().get()))
    show("split", lambda: mesh.flatten("r").split(r=("x", "y"), y=2).sizes)
    show("renamed", lambda: mesh.rename(a="z").sizes)
    show("any one", lambda: mesh.add.choose(0).get())
    show("a stream", lambda: sorted(future.get() for future in mesh.add.stream(0)))
    show("no answer wanted", lambda: mesh.add.broadcast(5))
    show("and it has come", lambda: values(mesh.add.call(0).get()))
    show("awaited", lambda: asyncio.run(awaited(mesh)))
    part = procs.slice(a=1).spawn("part", Seen)
    show("places on a part", lambda: values(part.where.call().get()))
    waiting = procs.spawn("waiting", Waiting, mesh.slice(a=0))
    show("from actor to actor", lambda: values(waiting.slice(a=1).ask.call(0).get()))
    show("here", lambda: face.this_proc().spawn("here", Seen).where.call_one().get())
    show("a failure", lambda: mesh.fail.call("words").get())
    show("one failure", lambda: mesh.slice(a=0, b=0).fail.call_one("words").get())
    show("and on it goes", lambda: values(mesh.add.call(0).get()))
    show("several for call_one", lambda: mesh.add.call_one(0).get(), kind=False)
    show("no such endpoint", lambda: mesh.nothing)
    show("no such argument", lambda: mesh.add.call(other=1).get(), kind=False)
    show("no such dimension", lambda: mesh.slice(z=0))
    show("no such index", lambda: mesh.slice(a=2))
    show("no such place", lambda: mesh.add.call(0).get().item(a=1))
    show("too late", lambda: mesh.slice(a=0, b=0).add.call_one(0).get(timeout=30))
    show("stopped", lambda: procs.stop().get())


if __name__ == "__main__":
    main()
