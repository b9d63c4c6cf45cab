"""Runs a training script slowly until a test lets it go on, and can leave one step of recovery out.

``python -m tests.support.staged [--leave-out push|heal] [--slow-saves] [--deal] GATE script.py args``: each step
takes a quarter of a second while the file GATE does not exist; while ``GATE.hang-REPLICA`` does, that replica
hangs. ``--slow-saves`` lets each checkpoint take half a second until then, and none come to its end while ``GATE.hold``
is there (``GATE.held-REPLICA`` says that one is held), so that something can happen meanwhile; with ``--deal`` a
sampler deals out batches, whatever the script makes of them. What is left out, a test must notice: it is a mutant.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from sky_monarch.training.checkpoint.folder import CheckpointFolder
from sky_monarch.training.process_group import ResilientGloo
from sky_monarch.training.sampler import Sampler
from sky_monarch.training.session import Session

STEP_S, SAVE_S = 0.25, 0.5


def leave_out(what: str) -> None:
    if what == "push":
        ResilientGloo.declare_dead = lambda self, quorum_id: None
    elif what == "heal":
        register = Session.register_state
        Session.register_state = lambda self, key, load, save: register(self, key, lambda state: None, save)
    else:
        raise SystemExit(f"nothing of the name {what!r} can be left out")


def slow_saves(gate: Path) -> None:
    publish = CheckpointFolder.publish

    def slowly(self, *arguments, **named):
        if not gate.exists():
            time.sleep(SAVE_S)
        while Path(f"{gate}.hold").exists():
            Path(f"{gate}.held-{os.environ['REPLICA_GROUP_ID']}").touch()
            time.sleep(0.02)
        return publish(self, *arguments, **named)

    CheckpointFolder.publish = slowly


def deal(_: Path) -> None:
    begin = Session.__init__

    def with_sampler(self, *arguments, **named):
        begin(self, *arguments, sampler=Sampler(100_000, 8), **named)

    Session.__init__ = with_sampler


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
    wanted = []
    for option, act in (("--slow-saves", slow_saves), ("--deal", deal)):
        if words[0] == option:
            wanted.append(act)
            del words[0]
    for act in wanted:
        act(Path(words[0]))
    slow_down(Path(words[0]))
    sys.argv = words[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
