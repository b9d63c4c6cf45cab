"""Runs a plain TorchFT script slowly until a test lets it go on: ``python -m … GATE script.py args``.

Each step takes a quarter of a second more while the file GATE does not exist; nothing else is touched.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from torchft import Optimizer

STEP_S = 0.25


def slow_down(gate: Path) -> None:
    step = Optimizer.step

    def slowly(self, closure=None):
        if not gate.exists():
            time.sleep(STEP_S)
        return step(self, closure)

    Optimizer.step = slowly


def main() -> None:
    slow_down(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
