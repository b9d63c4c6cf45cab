"""The cluster and the SkyPilot that knows it, together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.e2e.skypilot import SkyPilot
from tests.e2e.slurm import Slurm


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a run goes.

    Attributes:
        slurm: The cluster.
        sky: Its SkyPilot.
    """

    slurm: Slurm
    sky: SkyPilot

    def free_nodes(self) -> list[str]:
        """Nodes that run, and on which no job is."""
        busy = {job.node for job in self.slurm.jobs()}
        return [node for node in self.slurm.nodes if node not in busy and self.slurm.node(node).runs]


def _say(what: str, since_s: float) -> None:
    # Past pytest's capture: who waits for minutes wants to know for what.
    os.write(2, f"[e2e +{time.monotonic() - since_s:.1f} s] {what}\n".encode())


@contextmanager
def site(nodes: int = 4) -> Iterator[Site]:
    """A cluster with SkyPilot for the length of the block; nothing of it is left."""
    began_s = time.monotonic()
    slurm = Slurm(nodes)
    sky = SkyPilot(slurm)
    try:
        slurm.start()
        _say(f"{nodes} nodes are idle, each with a SIMULATED GPU (GRES on a clone of /dev/null)", began_s)
        sky.start()
        _say("SkyPilot's API server answers", began_s)
        yield Site(slurm=slurm, sky=sky)
    finally:
        sky.close()
        slurm.close()
        _say("all of it is gone", began_s)
