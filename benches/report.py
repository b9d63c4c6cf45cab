"""How a bench prints what it measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def emit(peer: str, figure: str, value: float, unit: str, *, load: str) -> None:
    """Print one figure as a JSON line; ``load`` is what was asked of the machine, followed by what it was."""
    load = f"{load}, load average {os.getloadavg()[0]:.1f}"
    line = {"peer": peer, "figure": figure, "value": round(value, 4), "unit": unit, "load": load}
    print(json.dumps(line), flush=True)


def emit_distribution(
    peer: str, figure: str, values: Sequence[float], unit: str, *, load: str
) -> dict[str, float]:
    """Print median, 99th percentile and maximum of ``values``."""
    ordered = sorted(values)
    summary = {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }
    for name, value in summary.items():
        emit(peer, f"{figure}_{name}", value, unit, load=load)
    emit(peer, f"{figure}_n", len(ordered), "count", load=load)
    return summary


@contextmanager
def busy(processes: int | None = None) -> Iterator[None]:
    """Keep every core busy for the length of the block."""
    count = processes or os.cpu_count() or 1
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
