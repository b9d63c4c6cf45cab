"""Actors whose answers are pieces of a whole. Importable, as those of a program's own modules are."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

from sky_monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint


class Part(Actor):
    """Gives pieces of a whole."""

    def __init__(self) -> None:
        self.end = " "

    @endpoint
    def mark(self, end: str) -> None:
        self.end = end

    @endpoint
    def piece(self, number: int) -> tuple[str, list[int]]:
        return f"{current_rank().rank}.{number}{self.end}", []

    @endpoint
    async def piece_later(self, number: int) -> tuple[str, list[int]]:
        await asyncio.sleep(0.001 * (5 - current_rank().rank))
        return f"{current_rank().rank}.{number}{self.end}", []

    @concurrent_endpoint
    def piece_beside(self, number: int) -> tuple[str, list[int]]:
        return f"{current_rank().rank}.{number}{self.end}", []

    @endpoint
    def large(self, n: int) -> Any:
        import numpy as np

        return np.ones(n)

    @endpoint
    def fails(self, rank: int, s: float) -> tuple[str, list[int]]:
        if current_rank().rank == rank:
            raise ValueError(f"rank {rank} fails")
        time.sleep(s if current_rank().rank > 3 else 0.0)
        return "", []

    @endpoint
    def kill_in(self, rank: int, s: float) -> None:
        if current_rank().rank == rank:
            threading.Timer(s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    @endpoint
    def folds(self) -> int:
        from sky_monarch.actors.runtime import runtime

        return len(runtime().folds.open)
