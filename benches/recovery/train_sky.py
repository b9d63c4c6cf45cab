"""The script that the job of peer ``sky-monarch`` runs: a plain loop with a session."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from torch import nn

from benches.recovery import model as shared
from benches.recovery.events import RankLog, log_path
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
    options = parser.parse_args()

    model, optimizer = shared.build()
    extra = shared.extra_state(options.state_gib)

    def load_extra(state: Any) -> None:
        nonlocal extra
        extra = state

    loss_of = nn.CrossEntropyLoss()
    session = Session(model, optimizer)
    if options.state_gib:
        session.register_state("extra", load_extra, lambda: extra)
    log = RankLog(log_path(options.folder, session.replica, session.rank))
    log.write("main", started=started)
    if options.mark_rendezvous:
        mark_rendezvous(log)
    recorder = shared.Recorder(log, model, optimizer, options.folder / "stop")
    with session:
        while session.running:
            before = session.step
            inputs, labels = shared.batch(before, session.replica, session.rank)
            shared.compute()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            session.step_optimizer(metrics={"loss": loss.detach()})
            recorder.step(before, session.step)


if __name__ == "__main__":
    main()
