"""The script that the job of peer ``sky-monarch`` runs: a plain loop with a session."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benches.recovery import model as shared
from benches.recovery.events import RankLog, fail_if_told, log_path
from benches.recovery.gate import Gate
from benches.recovery.tasks import TASKS
from sky_monarch.training import Session
from sky_monarch.training.process_group import ResilientGloo


def mark_rendezvous(log: RankLog) -> None:
    """Log when this rank enters the rendezvous of a quorum, so that a death can be timed into it."""
    configure = ResilientGloo.configure

    def marked(self: ResilientGloo, *arguments: Any, **options: Any) -> None:
        log.write("rendezvous")
        configure(self, *arguments, **options)

    ResilientGloo.configure = marked  # type: ignore[method-assign]


def main() -> None:
    """Train until killed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--state-gib", type=float, default=0.0)
    parser.add_argument("--mark-rendezvous", action="store_true")
    parser.add_argument("--task", choices=TASKS, default="labels")
    parser.add_argument("--block", type=int, default=0, help="steps from one gate to the next")
    options = parser.parse_args()

    model, optimizer = shared.build()
    task = TASKS[options.task]()
    extra = shared.extra_state(options.state_gib)

    def load_extra(state: Any) -> None:
        nonlocal extra
        extra = state

    session = Session(model, optimizer)
    if options.state_gib:
        session.register_state("extra", load_extra, lambda: extra)
    log = RankLog(log_path(options.folder, session.replica, session.rank))
    log.write("main", started=started)
    if options.mark_rendezvous:
        mark_rendezvous(log)
    recorder = shared.Recorder(log, model, optimizer, options.folder / "stop", task.held_out)
    gate = Gate(options.folder, log, options.block)

    def between_steps() -> None:
        gate.wait(session.step)
        if session.rank == 0:
            fail_if_told(options.folder, session.replica, log)

    with session:
        between_steps()
        while session.running:
            before = session.step
            inputs, targets = task.batch(before, session.replica, session.rank)
            shared.compute()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            session.step_optimizer(metrics={"loss": loss.detach()})
            recorder.step(before, session.step)
            between_steps()


if __name__ == "__main__":
    main()
