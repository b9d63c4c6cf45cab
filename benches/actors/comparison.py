"""All peers in turns, and what comes of it."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from benches.actors import tree
from benches.actors.figures import (
    BARS,
    DEATHS,
    DETECT_P99_MS,
    IN_TURNS,
    NAMES,
    OURS,
    RECOVER_MS,
    SCALE,
    Figure,
)
from benches.actors.peers import NAMES as PEERS
from benches.actors.subject import PeerError, Subject
from benches.overhead.paired import ratio_of
from benches.recovery.lifetime import leave_on_sigterm, workplace
from benches.recovery.watch import say
from benches.report import emit, emit_distribution

#: Between two deaths at most, beside what passes anyway: of the peers who look now and then, the phase varies. Ours
#: have processes that stand by again after half a second.
_SETTLE_S = {OURS: 0.5, "monarch": 5.0, "ray": 1.0}
_IDLE_S = 1.0

#: By peer and value, one for each round.
Rounds = dict[tuple[str, str], list[float]]


def compare(arguments: Sequence[str] = ()) -> int:
    """Measure; returns 1 where a peer is missing or did not get through.

    Args:
        arguments: Of the command line, without the bench's name.
    """
    options = _options(arguments)
    leave_on_sigterm()
    try:
        with ExitStack() as stack:
            subjects = []
            for name in options.peers:
                folder = stack.enter_context(workplace(keep=False))
                subjects.append(stack.enter_context(closing(Subject(name, folder, options.seconds))))
                say(f"{name} {subjects[-1].version} is up")
            _in_turns(subjects, IN_TURNS, options)
            _deaths(subjects, options)
            _in_turns(subjects, (SCALE,), options)  # last: who gets no further has the others' figures
    except (PeerError, OSError) as error:
        say(f"failed: {error}")
        return 1
    return 0


def _in_turns(subjects: Sequence[Subject], figures: Sequence[Figure], options: argparse.Namespace) -> None:
    for figure in figures:
        if figure.name not in options.figures:
            continue
        rounds: Rounds = {}
        number = max(2, options.rounds // 2) if figure is SCALE else options.rounds
        for turn in range(number):
            for subject in subjects if turn % 2 == 0 else reversed(subjects):
                if figure.only not in ("", subject.name):
                    continue
                for value, found in _measured(subject, figure).items():
                    rounds.setdefault((subject.name, value), []).append(found)
        load = f"{number} rounds in turns, {len(subjects)} peers up"
        _report(figure, rounds, load)


def _measured(subject: Subject, figure: Figure) -> dict[str, float]:
    sample = subject.measure(figure.loop, **figure.options)
    if figure is SCALE:
        time.sleep(_IDLE_S)
        private = statistics.median(tree.private_bytes(pid) for pid in sample["pids"])
        sample["private_MiB"] = private / (1 << 20)
    subject.settle()
    return figure.values(sample)


def _report(figure: Figure, rounds: Rounds, load: str) -> None:
    for (peer, value), found in rounds.items():
        emit(peer, value, statistics.median(found), figure.units[value], load=load)
    for (peer, value), found in rounds.items():
        ours = rounds.get((OURS, value))
        if peer == OURS or ours is None or min(*ours, *found) <= 0:
            continue
        ratio = ratio_of(ours, found)
        for name, each in (("", ratio.value), ("_low", ratio.low), ("_high", ratio.high)):
            emit(OURS, f"{value}_to_{peer}{name}", each, "ratio", load=load)
        for bar in BARS:
            if (bar.value, bar.peer) == (value, peer):
                interval = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
                say(f"{value} to {peer}: {interval}, {bar}: {bar.verdict(ratio.low, ratio.high)}")


def _deaths(subjects: Sequence[Subject], options: argparse.Namespace) -> None:
    """Kill; of ours as many as asked for, of the others, who take seconds for each, one or eight a round."""
    for figure, at_once in DEATHS.items():
        if figure not in options.figures:
            continue
        suffix = "" if at_once == 1 else f"_{at_once}"
        detect_ms: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        ended_ms: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        recover_ms: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        undetected = dict.fromkeys(detect_ms, 0)
        kills = math.ceil(options.deaths / at_once / options.rounds)
        for turn in range(options.rounds):
            for subject in subjects if turn % 2 == 0 else reversed(subjects):
                for _ in range(kills if subject.name == OURS else 1):
                    sample = subject.measure("deaths", at_once=at_once, settle_s=_SETTLE_S[subject.name])
                    subject.settle()
                    detect_ms[subject.name] += sample["detect_ms"]
                    ended_ms[subject.name] += sample["ended_ms"]
                    recover_ms[subject.name] += sample["recover_ms"]
                    undetected[subject.name] += sample["undetected"]
        load = f"{at_once} killed at once, {len(subjects)} peers up"
        for subject in subjects:
            detect = emit_distribution(
                subject.name, f"failure_detect_ms{suffix}", detect_ms[subject.name], "ms", load=load
            )
            # Of the same deaths: until the kernel itself has ended them.
            emit_distribution(subject.name, f"ended_ms{suffix}", ended_ms[subject.name], "ms", load=load)
            emit(subject.name, f"failure_undetected{suffix}", undetected[subject.name], "count", load=load)
            recover = emit_distribution(
                subject.name, f"recover_ms{suffix}", recover_ms[subject.name], "ms", load=load
            )
            if subject.name == OURS:
                for name, found, most in (
                    ("failure_detect_ms_p99", detect["p99"], DETECT_P99_MS),
                    ("recover_ms_p50", recover["p50"], RECOVER_MS),
                ):
                    say(
                        f"{name}{suffix}: {found:.1f}, at most {most:.0f}: {'met' if found <= most else 'missed'}"
                    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches actors")

    def names(known: Sequence[str]) -> object:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := set(chosen) - set(known):
                raise argparse.ArgumentTypeError(
                    f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}"
                )
            return [name for name in known if name in chosen]

        return parse

    parser.add_argument("--figures", type=names(NAMES), default=list(NAMES), help="some of them, with commas")
    parser.add_argument("--peers", type=names(PEERS), default=list(PEERS), help="some of them, with commas")
    parser.add_argument("--rounds", type=int, default=6, help="at least 2")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timed loop, about")
    parser.add_argument("--deaths", type=int, default=300, help="of ours, one at a time, and again 8 at once")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.seconds <= 0 or options.deaths < 1:
        parser.error("at least two rounds, a time above 0 and one death are needed")
    return options
