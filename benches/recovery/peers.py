"""What a peer is to the scenarios, and which there are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benches.recovery.analysis import Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for all peers of one scenario.

    Attributes:
        folder: Of this peer: logs of its ranks, the stop file, whatever else it writes.
        groups: Replica groups.
        ranks: Of each group.
        kills: How many are planned; a budget of restarts must not end before.
        state_gib: Extra state that each rank holds and a newcomer has to be given.
        mark_rendezvous: Ranks log when they enter a rendezvous.
        task: What they learn, of :mod:`benches.recovery.tasks`.
        block: Steps from one stop to the next, see :mod:`benches.recovery.gate`; 0: they do not stop.
    """

    folder: Path
    groups: int
    ranks: int
    kills: int
    state_gib: float = 0.0
    mark_rendezvous: bool = False
    task: str = "labels"
    block: int = 0

    @property
    def stop_file(self) -> Path:
        """Holds, once it exists, the step from which on ranks log digests."""
        return self.folder / "stop"


class Peer(Protocol):
    """A system that keeps replica groups alive."""

    def start(self) -> None:
        """Start all groups."""

    def warm_up(self) -> bool:
        """Wait, all groups training, for whatever makes the next restart fast; False where it did not come."""

    def aim(self, groups: Collection[int]) -> None:
        """Find out what :meth:`kill` needs to know of these groups."""

    def kill(self, group: int) -> frozenset[int]:
        """SIGKILL all ranks of a group that was aimed at, and let it be restarted at once; returns the pids."""

    def tend(self) -> None:
        """Restart what crashed by itself, where the peer has no supervisor of its own."""

    def kill_lighthouse(self) -> None:
        """SIGKILL the lighthouse, and let it be restarted at once."""

    def restarts(self) -> int:
        """Restarts of groups so far."""

    def observe(self) -> None:
        """Look at what is forgotten with time; called before each kill and at the end."""

    def false_drops(self, kills: Sequence[Kill]) -> int | None:
        """Live groups dropped from a quorum so far; None: there are no quorums."""

    def notes(self) -> Mapping[str, float]:
        """Counts of its own that explain its figures."""

    def close(self) -> None:
        """End everything."""


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def environment() -> dict[str, str]:
    """What all peers' processes get that are not started by sky-monarch."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    quiet = {"RUST_LOG": "error", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKY_MONARCH_", "TORCH", "MASTER_"))}
    return {**kept, **quiet}


def program(name: str) -> str | None:
    """A program of this interpreter's environment."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _sky(setting: Setting) -> Peer:
    from benches.recovery.sky import SkyMonarch

    return SkyMonarch(setting)


def _torchft(name: str) -> Callable[[Setting], Peer]:
    def make(setting: Setting) -> Peer:
        from benches.recovery.torchft import TUNINGS, TorchFT

        return TorchFT(setting, TUNINGS[name])

    return make


def _torchrun(setting: Setting) -> Peer:
    from benches.recovery.torchrun import Torchrun

    return Torchrun(setting)


PEERS: Mapping[str, Callable[[Setting], Peer]] = {
    "sky-monarch": _sky,
    "torchft-default": _torchft("torchft-default"),
    "torchft-tuned": _torchft("torchft-tuned"),
    "torchft-tuned-asks-first": _torchft("torchft-tuned-asks-first"),
    "torchrun": _torchrun,
}


def missing(peer: str) -> str | None:
    """What ``peer`` lacks to run here; None: nothing."""
    from importlib.util import find_spec

    modules = ["torch"] if peer == "torchrun" else ["torch", "torchft"]
    programs = {"sky-monarch": [], "torchrun": ["torchrun"]}.get(peer, ["torchft_lighthouse"])
    if peer == "sky-monarch":
        modules.append("sky_monarch._core")
    lacks = [name for name in modules if find_spec(name) is None] + [n for n in programs if not program(n)]
    return f"{', '.join(lacks)} not found" if lacks else None
