"""What a runtime has to offer to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

#: Longer than any measurement: a call of it is pending when its actor dies.
HANG_S = 600.0


class Peer(Protocol):
    """A runtime that has processes with one actor in each. A mesh is what it calls several of them.

    Every actor has the same methods in all runtimes: ``ping`` and ``echo`` return what they get, ``bump`` counts,
    ``count`` returns that count, ``pid`` the process, ``length`` the length of what it gets; ``hang`` sleeps.
    """

    def version(self) -> str:
        """Of the package."""
        ...

    def start(self) -> None:
        """Bring up the runtime, without actors."""
        ...

    def spawn(self, processes: int) -> Any:
        """Start that many processes with an actor in each; need not wait for them."""
        ...

    def spawn_over(self, transport: str, processes: int) -> Any:
        """The same on two other hosts, of this machine, which are reached over ``tls``; where it is asked for that."""
        ...

    def pids(self, mesh: Any) -> list[int]:
        """Ask all actors for their pids, in the order of ranks."""
        ...

    def call(self, mesh: Any, value: Any) -> Any:
        """Call ``ping`` of the first actor and wait for its answer."""
        ...

    def send(self, mesh: Any, messages: int) -> int:
        """Send ``bump`` to the first actor that often without an answer, then ask for its count."""
        ...

    def pipeline(self, mesh: Any, calls: int, window: int) -> None:
        """Call ``ping`` of the first actor that often, with ``window`` calls on their way."""
        ...

    def gather(self, mesh: Any) -> int:
        """Call ``ping`` of all actors and wait for all answers; returns how many came."""
        ...

    def echo(self, mesh: Any, payload: Any) -> Any:
        """Send a payload to the first actor and get it back."""
        ...

    def sink(self, mesh: Any, payload: Any) -> int:
        """Send a payload to the first actor, and get its length back."""
        ...

    def losable(self, processes: int) -> Any:
        """A mesh whose processes may die; for :meth:`pend` and :meth:`recover`."""
        ...

    def pend(self, mesh: Any, rank: int) -> Callable[[], None]:
        """Call ``hang`` of one actor; what is returned waits for that call, which raises when the actor dies."""
        ...

    def recover(self, mesh: Any, ranks: Sequence[int]) -> tuple[Any, dict[int, float]]:
        """Replace dead actors in the way that the runtime offers.

        Returns:
            The mesh to go on with, and for each rank when (monotonic, seconds) its replacement had answered first.
        """
        ...

    def stop(self, mesh: Any) -> None:
        """End its processes."""
        ...

    def close(self) -> None:
        """End the runtime."""
        ...
