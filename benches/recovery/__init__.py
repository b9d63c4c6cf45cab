"""What a SIGKILL costs, beside TorchFT (as it comes, and tuned) and torchrun, in the same run.

    python -m benches recovery --scenario quiet --peers sky-monarch,torchft-tuned --kills 20

Four groups train one small model under each peer, one peer after the other. Groups are killed at random moments;
what that cost is read from the ranks' own logs of their commits. Figures, with the median (``p50``), ``p99``, ``max``
and number (``n``) over all kills:

``survivor_gap_s``     longest commit interval of the worst survivor, from just before the kill until the newcomer is
                       in and a second longer
``survivor_stall_s``   what the worst survivor lost: over 10 s after the kill, the sum of (commit interval - its median
                       interval). The window ends with the next kill where that comes earlier
                       (``survivor_stall_window_s``); by default kills are 10 s apart, 4 s where more than 20 are asked
                       for. ``survivor_stall_undisturbed_s`` is the same sum over the two seconds before the kill,
                       scaled to that window: on a machine that is not quiet it drowns the rest. In
                       ``survivor_stall_net_s`` each survivor is charged only with what is more than it loses in the
                       undisturbed seconds before all kills together
``rejoin_s``           kill to the first commit of the killed group
``lost_steps``         steps of the worst survivor that failed, or had to be done again
``steps_per_s``        undisturbed: the inverse of the median commit interval
``false_drops``        live groups that a lighthouse dropped: by its own log (TorchFT) or history (ours)
``collateral_crashes`` restarts of groups that nobody killed
``bit_equal``          1 if parameters and optimizer state of all ranks have one SHA-256 at the end, and parameters one
                       checksum at each tenth step

and the ratios of ours to TorchFT's. A kill waits until our standbys are ready again, as TorchFT's fork server always
is (``--impatient``: it does not); ``standby_refill_s`` says how long that takes.

Scenarios: ``quiet``; ``busy`` (both cores); ``inner`` (two ranks a group, all killed); ``state`` (1.5 GiB more,
or ``--state-gib``: each of the ``--groups`` has it twice, in its process and in our standby);
``double`` (a second group is killed 0-10 ms after the first survivor logged that it enters its process group's
``configure`` for the next quorum, by a line that both scripts write there); ``lighthouse`` (killed instead of a group).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

from benches.recovery import analysis
from benches.recovery.lifetime import closing, leave_on_sigterm, workplace
from benches.recovery.peers import PEERS, Setting, missing
from benches.recovery.scenarios import GROUPS, SCENARIOS, Outcome, Plan, Scenario, Trial
from benches.recovery.watch import say
from benches.report import emit, emit_distribution
from sky_monarch.errors import SkyMonarchError

_DEFAULT_KILLS, _DEFAULT_BUDGET_S = 5, 75.0
_MANY_KILLS, _SPACING_S, _SPACING_OF_MANY_S = 20, 10.0, 4.0
_OURS, _THEIRS = "sky-monarch", ("torchft-default", "torchft-tuned")


def run(arguments: Sequence[str] = ()) -> int:
    """Measure; returns 1 where a peer is missing or did not get through.

    Args:
        arguments: Of the command line, without the bench's name.
    """
    options = _options(arguments)
    leave_on_sigterm()
    scenario = SCENARIOS[options.scenario]
    if options.state_gib is not None:
        load = f"quiet, {options.groups} groups with {options.state_gib:g} GiB of extra state"
        scenario = dataclasses.replace(scenario, state_gib=options.state_gib, load=load)
    plan = Plan(
        kills=options.kills,
        spacing_s=options.spacing_s,
        budget_s=options.budget_s,
        impatient=options.impatient,
        seed=options.seed,
    )
    outcomes: dict[str, Outcome] = {}
    for peer in options.peers:
        lacks = missing(peer)
        if lacks:
            say(f"{peer} is missing: {lacks}")
            continue
        outcome = measure(peer, scenario, plan, groups=options.groups, keep=options.keep)
        if outcome is not None:
            report(peer, outcome, scenario.load)
            outcomes[peer] = outcome
    report_ratios(outcomes, scenario.load)
    return 0 if outcomes.keys() == set(options.peers) else 1


def measure(peer: str, scenario: Scenario, plan: Plan, *, groups: int = GROUPS, keep: bool) -> Outcome | None:
    """One peer; None where it did not get through, and its logs are then kept."""
    try:
        with workplace(keep=keep) as folder:
            say(f"{peer}: starts, logs in {folder}")
            setting = Setting(
                folder=folder,
                groups=groups,
                ranks=scenario.ranks,
                kills=plan.kills,
                state_gib=scenario.state_gib,
                mark_rendezvous=scenario.victims > 1,
            )
            subject = PEERS[peer](setting)
            with closing(subject):
                return Trial(subject, setting, scenario, plan).run()
    except (RuntimeError, ValueError, AssertionError, OSError, SkyMonarchError) as error:
        say(f"{peer}: failed: {error}")
        return None


def report(peer: str, outcome: Outcome, load: str) -> None:
    """Print the figures of one peer."""
    kills = outcome.kills
    emit_distribution(peer, "survivor_gap_s", [kill.gap_s for kill in kills], "s", load=load)
    emit_distribution(peer, "survivor_stall_s", [kill.stall_s for kill in kills], "s", load=load)
    emit_distribution(peer, "survivor_stall_net_s", [kill.stall_net_s for kill in kills], "s", load=load)
    window_s = statistics.median(kill.stall_window_s for kill in kills)
    emit(peer, "survivor_stall_window_s", window_s, "s", load=load)
    undisturbed_s = statistics.median(kill.undisturbed_stall_s for kill in kills)
    emit(peer, "survivor_stall_undisturbed_s", undisturbed_s, "s", load=load)
    if back_s := [kill.rejoin_s for kill in kills if kill.rejoin_s is not None]:
        emit_distribution(peer, "rejoin_s", back_s, "s", load=load)
    emit(peer, "lost_steps_mean", statistics.mean(kill.lost_steps for kill in kills), "steps", load=load)
    emit(peer, "lost_steps_max", max(kill.lost_steps for kill in kills), "steps", load=load)
    emit(peer, "steps_per_s", outcome.steps_per_s, "1/s", load=load)
    if outcome.false_drops is not None:
        emit(peer, "false_drops", outcome.false_drops, "count", load=load)
    emit(peer, "collateral_crashes", outcome.collateral_crashes, "count", load=load)
    emit(peer, "bit_equal", float(outcome.equality.bit_equal), "bool", load=load)
    emit(peer, "checksums_compared", outcome.equality.compared, "steps", load=load)
    emit(peer, "checksums_differing", len(outcome.equality.disagreements), "steps", load=load)
    for name, value in outcome.notes.items():
        emit(peer, name, value, "s" if "_s_" in name else "count", load=load)


def report_ratios(outcomes: dict[str, Outcome], load: str) -> None:
    """Print ours to theirs, of medians."""
    if _OURS not in outcomes:
        return
    for theirs in _THEIRS:
        if theirs not in outcomes:
            continue
        ours_kills, their_kills = outcomes[_OURS].kills, outcomes[theirs].kills
        for figure in ("gap_s", "stall_s", "stall_net_s", "rejoin_s"):
            ours = [value for kill in ours_kills if (value := getattr(kill, figure)) is not None]
            others = [value for kill in their_kills if (value := getattr(kill, figure)) is not None]
            if ours and others:
                value = analysis.ratio(statistics.median(ours), statistics.median(others))
                shown = figure if figure == "rejoin_s" else f"survivor_{figure}"
                emit(_OURS, f"{shown}_to_{theirs}_ratio", value, "ratio", load=load)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches recovery", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="quiet")
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(PEERS)} (default: the scenario's)")
    parser.add_argument(
        "--kills", type=int, help=f"default: {_DEFAULT_KILLS}, or as many as {_DEFAULT_BUDGET_S:g} s allow"
    )
    parser.add_argument("--groups", type=int, default=GROUPS, help="default: %(default)s")
    parser.add_argument(
        "--state-gib", type=float, help="extra state of each rank, in place of the scenario's"
    )
    parser.add_argument("--spacing-s", type=float, help="least time between two kills")
    parser.add_argument("--budget-s", type=float, help="no kill later than this after a peer's first")
    parser.add_argument("--seed", type=int, default=7, help="of victims and moments (default: %(default)s)")
    parser.add_argument(
        "--impatient", action="store_true", help="kill also where our next standby is not ready yet"
    )
    parser.add_argument("--keep", action="store_true", help="keep all logs")
    options = parser.parse_args(arguments)
    allowed = SCENARIOS[options.scenario].peers
    options.peers = options.peers.split(",") if options.peers else list(allowed)
    for peer in options.peers:
        if peer not in PEERS:
            parser.error(f"no peer named {peer}; there are {', '.join(PEERS)}")
        if peer == "torchrun" and peer not in allowed:
            parser.error(f"scenario {options.scenario} cannot be done to {peer}")
    if options.kills is not None and options.kills < 1:
        parser.error("--kills must be at least 1")
    if options.budget_s is None:
        options.budget_s = float("inf") if options.kills else _DEFAULT_BUDGET_S
    options.kills = options.kills or _DEFAULT_KILLS
    if options.spacing_s is None:
        options.spacing_s = _SPACING_S if options.kills <= _MANY_KILLS else _SPACING_OF_MANY_S
    return options
