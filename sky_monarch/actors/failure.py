"""A failure, as its owner hears of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["MeshFailure", "describe_status"]


def describe_status(status: int) -> str:
    """What a wait status says, in words."""
    import os

    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"killed by signal {number}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFailure:
    """A process of a mesh ended, or an actor in it failed.

    Attributes:
        mesh_name: The mesh of processes, or of actors where only its actor failed.
        actors: Meshes of actors that had one there.
        rank: Where, in the mesh of processes.
        host: Name of its host.
        pid: Of the process.
        reason: How it ended: a signal, an exit code, an exception.
        last_lines: What it printed last.
        ranks: All that ended with it, where a host was lost; empty where it is one.
    """

    mesh_name: str
    actors: tuple[str, ...]
    rank: int
    host: str
    pid: int
    reason: str
    last_lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def mesh(self) -> str:
        """The name of the mesh."""
        return self.mesh_name

    @property
    def crashed_ranks(self) -> tuple[int, ...]:
        """The ranks that have ended."""
        return self.ranks or (self.rank,)

    def __str__(self) -> str:
        actors = f" (actors: {', '.join(self.actors)})" if self.actors else ""
        if self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            return f"{self.mesh_name}[{ranks}]{actors} on {self.host}: {self.reason}"
        return f"{self.mesh_name}[{self.rank}]{actors} on {self.host}, pid {self.pid}: {self.reason}"

    def report(self) -> str:
        """All of it, in several lines."""
        lines = "".join(f"\n  | {line}" for line in self.last_lines)
        return f"sky-monarch: failure of {self}{f'{chr(10)}  its last lines:{lines}' if lines else ''}"
