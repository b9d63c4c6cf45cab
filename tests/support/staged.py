"""Runs a training script slowly until a test lets it go on, and can leave one step of recovery out.

``python -m tests.support.staged [--leave-out push|heal] GATE script.py args``: each step takes a quarter of a
second while the file GATE does not exist; while ``GATE.hang-REPLICA`` does, that replica hangs. What is left
out, a test must notice: it is a mutant.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from sky_monarch.training.process_group import ResilientGloo
from sky_monarch.training.session import Session

STEP_S = 0.25


def leave_out(what: str) -> None:
    if what == "push":
        ResilientGloo.declare_dead = lambda self, quorum_id: None
    elif what == "heal":
        register = Session.register_state
        Session.register_state = lambda self, key, load, save: register(self, key, lambda state: None, save)
    else:
        raise SystemExit(f"nothing of the name {what!r} can be left out")


def slow_down(gate: Path) -> None:
    step_optimizer = Session.step_optimizer

    def slowly(self, metrics=None):
        while Path(f"{gate}.hang-{self.replica}").exists():
            time.sleep(1)
        if not gate.exists():
            time.sleep(STEP_S)
        return step_optimizer(self, metrics)

    Session.step_optimizer = slowly


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "--leave-out":
        leave_out(words[1])
        del words[:2]
    slow_down(Path(words[0]))
    sys.argv = words[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
