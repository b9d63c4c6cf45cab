"""Actors that get stuck, print much, and reach breakpoints."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from sky_monarch.actor import Actor, current_rank, endpoint
from tests.support.actors import wait_for


class Stuck(Actor):
    """Stays where it is told to."""

    @endpoint
    def stay_in_here(self, path: str, rank: int | None = None) -> int:
        if rank is None or current_rank().rank == rank:
            while not Path(path).exists():
                time.sleep(0.05)
        return current_rank().rank

    @endpoint
    def hold_the_lock(self, s: int) -> None:
        """Sleep in C, without letting other threads of Python run."""
        ctypes.PyDLL(None).sleep(s)


class Waiting(Actor):
    """Has coroutines."""

    @endpoint
    async def wait_in_here(self, s: float) -> None:
        await self._deeper(s)

    async def _deeper(self, s: float) -> None:
        await asyncio.sleep(s)


class Talker(Actor):
    @endpoint
    def say(self, words: str, times: int = 1) -> None:
        for number in range(times):
            print(words.format(rank=current_rank().rank, number=number))

    @endpoint
    def complain(self, words: str) -> None:
        sys.stderr.write(words + "\n")


class Debugged(Actor):
    @endpoint
    def stop_here(self, secret: int) -> int:
        found = secret
        breakpoint()
        return found


class Strict(Actor):
    """Endpoints with all kinds of arguments."""

    @endpoint
    def plain(self, n: int, scale: float = 1.0) -> float:
        return n * scale

    @endpoint
    async def keyword(self, *, name: str) -> str:
        return name

    @endpoint
    def anything(self, *args: int, **kwargs: int) -> int:
        return sum(args) + sum(kwargs.values())


class Group(Actor):
    """Stands for a replica group that trains."""

    @endpoint
    def work(self, gate: str, fails: tuple[int, int], opens: int, dies: bool = False) -> tuple[str, str, str]:
        """Work.

        Args:
            gate: A file. Until it is there the others work.
            fails: Group ``fails[0]`` fails at once in its first ``fails[1]`` generations.
            opens: The generation of that group which makes the file.
            dies: It fails by its end.
        """
        replica, generation = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["SKY_MONARCH_GENERATION"])
        if replica == fails[0]:
            if generation >= opens:
                Path(gate).touch()
            if generation <= fails[1]:
                if dies:
                    os._exit(9)
                raise ValueError(f"generation {generation} cannot work")
        else:
            wait_for(gate)
        return os.environ["TORCHFT_LIGHTHOUSE"], os.environ["NUM_REPLICA_GROUPS"], os.environ["RANK"]


class Planter(Actor):
    """Spawns on processes that somebody else has started."""

    @endpoint
    def plant(self, procs: Any) -> Any:
        return procs.spawn("planted", Talker)

    @endpoint
    def plant_when(self, procs: Any, go: str, handle: str) -> None:
        """Spawn once there is a file, and leave the handle in another."""
        Path(f"{go}.ready").touch()
        wait_for(go)
        Path(f"{handle}.new").write_bytes(pickle.dumps(procs.spawn("planted", Talker)))
        Path(f"{handle}.new").rename(handle)

    @endpoint
    def pid(self) -> int:
        return os.getpid()
