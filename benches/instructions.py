"""Instructions of the actors' hot path below Python: the figure that does not depend on what else the machine does.

    make bench-instructions          (needs valgrind)

``mesh_…_instructions`` is what both processes' core spends on one message, kernel and Python left out, as callgrind
counts it: the difference between two numbers of messages, so that what a start costs is not in it. ``call`` is one call
after the other, ``window`` with a hundred on their way, ``send`` a message without an answer. The median of three runs;
``…_spread`` is how far apart they were, relative to it: threads take turns as they happen to.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benches.report import emit

_ROOT = Path(__file__).parents[1]
_KINDS = ("call", "window", "send")
_FEW, _MANY = 500, 3500
_RUNS = 3
_LIMIT_S = 120
_COUNTED = re.compile(r"Collected : (\d+)")


def run() -> int:
    """Build the example, count and print; returns 1 where valgrind is missing."""
    if shutil.which("valgrind") is None:
        print("error: valgrind is missing", "hint: apt-get install valgrind", sep="\n", file=sys.stderr)
        return 1
    cargo = [
        "cargo",
        "build",
        "--quiet",
        "--release",
        "--package",
        "sky-monarch-core",
        "--example",
        "mesh_messages",
    ]
    subprocess.run(cargo, cwd=_ROOT, check=True)
    program = _ROOT / "target/release/examples/mesh_messages"
    for kind in _KINDS:
        found = []
        for _ in range(_RUNS):
            few, many = (_instructions(program, kind, number) for number in (_FEW, _MANY))
            found.append((many - few) / (_MANY - _FEW))
        median = statistics.median(found)
        load = f"{_MANY - _FEW} messages, {_RUNS} runs"
        emit("sky-monarch", f"mesh_{kind}_instructions", median, "instructions", load=load)
        emit(
            "sky-monarch",
            f"mesh_{kind}_instructions_spread",
            (max(found) - min(found)) / median,
            "ratio",
            load=load,
        )
    return 0


def _instructions(program: Path, kind: str, number: int) -> int:
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        str(program),
        kind,
        str(number),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    counted = _COUNTED.search(done.stderr)
    if done.returncode or counted is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return int(counted.group(1))
