"""Ten minutes in which something fails every 15 seconds, beside TorchFT under the same schedule, and undisturbed.

    python -m benches chaos [--minutes 10] [--peers sky-monarch,undisturbed,torchft-default] [--seed 7]

Four groups of one rank learn what a fixed small network says (0.6 M parameters, a step of 30 ms and more), one peer
after the other. A seed draws moments, kinds and victims of the failures; they are the same for each peer:

``kill``        SIGKILL of a rank
``exit``        the script of a rank fails by itself, with exit code 1
``hang``        SIGSTOP of a rank. If its process is still there after 20 s it goes on (SIGCONT), under every peer. Our
                watchdog replaces it sooner: ``progress_limit_s`` is 5 here, where by default it is at least 60
``two``         SIGKILL of two ranks at once
``lighthouse``  SIGKILL of the lighthouse
``controller``  SIGKILL of our controller; TorchFT has none, so that nothing happens to it

For TorchFT (its defaults; but a collective's timeout of 5 s, not 60) this bench is the supervisor: within 20 ms it
restarts a rank or a lighthouse that ended, whatever the reason, without limit or back-off. Nobody has a checkpoint:
where all groups die at once, training begins anew. ``undisturbed`` is sky-monarch with no failure, for as long.

``goodput``             committed samples that stayed (each group's batch counts in each step that it took part in), as
                        a ratio to ``undisturbed``. ``goodput_to_own_pace``: to four groups at the peer's own median
                        step; ``goodput_at_own_pace``: that as a ratio to that of ``undisturbed``, which leaves out how
                        much faster or slower the whole machine was in one of the two runs
``steps_per_s``         committed steps that stayed
``groups_per_step``     that took part in one, on average
``lost_steps_mean``, ``lost_steps_max``  of a group: attempts that failed, or did again what was done before
``steps_undone``        committed, and lost where training began anew
``longest_stall_s``     in which no group committed anything
``rejoin_s``            from each hit to the next commit of its group; ``hits`` says of how many
``held_out_loss``       at the end of time: share of the targets' variance that is not explained, mean of the last five
                        evaluations. ``held_out_loss_same_step_ratio``: to ``undisturbed`` at the same steps;
                        ``held_out_loss_ratio``: to ``undisturbed`` at the end of time
``hangs_replaced``      hung processes that the peer itself made an end of
``false_drops``, ``collateral_crashes``, ``bit_equal``  as in ``benches.recovery``; bits after the failures, all at rest
``failures``, ``failures_missed``  carried out; and those that found nobody, or nothing, to hit
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

from benches.chaos import figures, schedule
from benches.chaos.schedule import Failure
from benches.chaos.storm import Outcome, Storm
from benches.chaos.subjects import StormySky, StormyTorchFT, Subject
from benches.recovery.analysis import ratio
from benches.recovery.lifetime import closing, leave_on_sigterm, workplace
from benches.recovery.peers import Setting, missing
from benches.recovery.watch import say
from benches.report import emit, emit_distribution
from sky_monarch.errors import SkyMonarchError

GROUPS = 4
_UNDISTURBED = "undisturbed"
# Undisturbed between the two: right after the one and right before the other.
PEERS: dict[str, Callable[[Setting], Subject]] = {
    "sky-monarch": StormySky,
    _UNDISTURBED: StormySky,
    "torchft-default": StormyTorchFT,
}


def run(arguments: Sequence[str] = ()) -> int:
    """Measure; returns 1 where a peer is missing or did not get through.

    Args:
        arguments: Of the command line, without the bench's name.
    """
    options = _options(arguments)
    leave_on_sigterm()
    failures = schedule.draw(
        seed=options.seed,
        seconds=options.minutes * 60,
        every_s=options.every_s,
        groups=GROUPS,
        kinds=options.kinds,
    )
    load = f"{len(failures)} failures in {options.minutes:g} min, seed {options.seed}"
    outcomes: dict[str, Outcome] = {}
    for peer in options.peers:
        lacks = missing("torchft-default" if peer == "torchft-default" else "sky-monarch")
        if lacks:
            say(f"{peer} is missing: {lacks}")
            continue
        what = () if peer == _UNDISTURBED else failures
        outcome = measure(peer, what, options.minutes * 60, keep=options.keep)
        if outcome is not None:
            report(peer, outcome, load)
            outcomes[peer] = outcome
    report_ratios(outcomes, load)
    return 0 if outcomes.keys() == set(options.peers) else 1


def measure(peer: str, failures: Sequence[Failure], seconds: float, *, keep: bool) -> Outcome | None:
    """One peer; None where it did not get through, and its logs are then kept."""
    try:
        with workplace(keep=keep) as folder:
            say(f"{peer}: starts, logs in {folder}")
            victims = sum(max(1, len(failure.victims)) for failure in failures)
            setting = Setting(folder=folder, groups=GROUPS, ranks=1, kills=victims, task="teacher")
            subject = PEERS[peer](setting)
            with closing(subject):
                return Storm(subject, setting, failures, seconds).run()
    except (RuntimeError, ValueError, AssertionError, OSError, SkyMonarchError) as error:
        say(f"{peer}: failed: {error}")
        return None


def report(peer: str, outcome: Outcome, load: str) -> None:
    """Print the figures of one peer."""
    kept, equality = outcome.kept, outcome.equality

    def show(figure: str, value: float, unit: str) -> None:
        emit(peer, figure, value, unit, load=load)

    show("failures", sum(outcome.failures.values()), "count")
    show("failures_missed", outcome.missed, "count")
    for kind, count in sorted(outcome.failures.items()):
        show(f"failures_{kind}", count, "count")
    show("samples_per_s", kept.samples_per_s, "1/s")
    show("goodput_to_own_pace", outcome.to_own_pace, "ratio")
    show("steps_per_s", kept.steps / kept.seconds, "1/s")
    show("groups_per_step", kept.groups_per_step, "count")
    show("last_step", kept.last_step, "steps")
    show("lost_steps_mean", statistics.mean(outcome.lost_steps), "steps")
    show("lost_steps_max", max(outcome.lost_steps), "steps")
    show("steps_undone", kept.undone, "steps")
    show("longest_stall_s", kept.longest_stall_s, "s")
    show("hits", outcome.strikes, "count")
    if outcome.rejoins_s:
        emit_distribution(peer, "rejoin_s", outcome.rejoins_s, "s", load=load)
    show("hangs_replaced", outcome.hangs_replaced, "count")
    if (loss := figures.last_loss(outcome.losses)) is not None:
        show("held_out_loss", loss, "share")
    show("false_drops", outcome.false_drops, "count")
    show("collateral_crashes", outcome.collateral_crashes, "count")
    show("recovered", float(outcome.recovered), "bool")
    show("bit_equal", float(equality.bit_equal), "bool")
    show("checksums_compared", equality.compared, "steps")
    show("checksums_differing", len(equality.disagreements), "steps")
    for name, value in outcome.notes.items():
        show(name, value, "s" if "_s_" in name else "count")


def report_ratios(outcomes: dict[str, Outcome], load: str) -> None:
    """Print what each peer kept of the undisturbed run."""
    undisturbed = outcomes.get(_UNDISTURBED)
    if undisturbed is None:
        return
    their_end = figures.last_loss(undisturbed.losses)
    for peer, outcome in outcomes.items():
        if outcome is undisturbed:
            continue
        goodput = ratio(outcome.kept.samples_per_s, undisturbed.kept.samples_per_s)
        emit(peer, "goodput", goodput, "ratio", load=load)
        at_own_pace = ratio(outcome.to_own_pace, undisturbed.to_own_pace)
        emit(peer, "goodput_at_own_pace", at_own_pace, "ratio", load=load)
        loss = figures.last_loss(outcome.losses, undisturbed.losses)
        theirs = figures.last_loss(undisturbed.losses, outcome.losses)
        if loss is not None and theirs is not None:
            emit(peer, "held_out_loss_same_step_ratio", ratio(loss, theirs), "ratio", load=load)
        loss = figures.last_loss(outcome.losses)
        if loss is not None and their_end is not None:
            emit(peer, "held_out_loss_ratio", ratio(loss, their_end), "ratio", load=load)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches chaos", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="under each peer (default: %(default)g)")
    parser.add_argument("--peers", default=",".join(PEERS), help="in this order (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=7, help="of moments, kinds and victims (default: %(default)s)"
    )
    parser.add_argument(
        "--every-s", type=float, default=15.0, help="mean time between failures (default: %(default)g)"
    )
    parser.add_argument("--kinds", default=",".join(schedule.KINDS), help="that occur (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep all logs")
    options = parser.parse_args(arguments)
    options.peers, options.kinds = options.peers.split(","), options.kinds.split(",")
    for what, named, known in (("peer", options.peers, PEERS), ("kind", options.kinds, schedule.KINDS)):
        for name in named:
            if name not in known:
                parser.error(f"no {what} named {name}; there are {', '.join(known)}")
    if not 0 < options.minutes <= 120:
        parser.error("--minutes must be more than 0, and 120 at most")
    if options.every_s < 1:
        parser.error("--every-s must be at least 1")
    return options
