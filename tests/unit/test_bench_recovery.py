"""The recovery bench's figures, from logs whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from benches.recovery import analysis
from benches.recovery.analysis import Kill

STEP_S = 0.1


def steps(pid: int, first: int, count: int, *, start_s: float, ok: bool = True) -> list[dict[str, Any]]:
    """Steps ``first, first + 1, …`` of one process, one each ``STEP_S``, the first at ``start_s``."""
    return [
        {"event": "step", "pid": pid, "step": first + i, "ok": ok, "t": start_s + i * STEP_S}
        for i in range(count)
    ]


def stalled(pid: int, *, at_s: float, gap_s: float, until_s: float = 40.0) -> list[dict[str, Any]]:
    """A survivor: it commits each ``STEP_S`` from 0 s on, but for one interval of ``gap_s`` after ``at_s``."""
    before = steps(pid, 1, round(at_s / STEP_S) + 1, start_s=0.0)
    after_s = before[-1]["t"] + gap_s
    return before + steps(pid, before[-1]["step"] + 1, round((until_s - after_s) / STEP_S), start_s=after_s)


def killed(*, at_s: float, back_s: float) -> list[dict[str, Any]]:
    """A group: pid 1 until ``at_s``, pid 2 from ``back_s`` on."""
    before = steps(1, 1, round(at_s / STEP_S), start_s=0.0)
    return before + steps(2, before[-1]["step"] + 5, 100, start_s=back_s)


KILL = Kill(at_s=20.04, groups={0: 20.04}, pids=frozenset({1}))


def figures_of(kill: Kill, logs: analysis.Logs, *, until_s: float) -> analysis.KillFigures:
    """Of the only kill."""
    return analysis.figures_of(kill, logs, until_s=until_s, unrest_of=analysis.unrest([kill], logs))


def test_a_known_gap_gives_that_gap_stall_and_rejoin() -> None:
    logs = {
        (0, 0): killed(at_s=20.0, back_s=20.7),
        (1, 0): stalled(11, at_s=20.0, gap_s=0.45),
        (2, 0): stalled(12, at_s=20.0, gap_s=0.65),
    }
    figures = figures_of(KILL, logs, until_s=35.0)
    assert figures.gap_s == pytest.approx(0.65), (
        "that of the worst survivor, whose commit before the kill counts"
    )
    assert figures.stall_s == pytest.approx(0.55)
    assert figures.stall_window_s == pytest.approx(10.0)
    assert figures.undisturbed_stall_s == pytest.approx(0.0)
    assert figures.rejoin_s == pytest.approx(0.66)
    assert figures.lost_steps == 0


def test_what_a_restless_machine_costs_is_not_the_kills() -> None:
    restless = stalled(11, at_s=20.0, gap_s=0.45)
    for event in restless:  # one interval in ten is three times as long, before the kill and after it
        event["t"] += 0.2 * (event["step"] // 10)
    logs = {(0, 0): killed(at_s=28.0, back_s=28.7), (1, 0): restless}
    moment = Kill(at_s=24.02, groups={0: 24.02}, pids=frozenset({1}))
    figures = figures_of(moment, logs, until_s=60.0)
    assert figures.stall_s == pytest.approx(0.35 + 8 * 0.2, abs=0.21)
    assert figures.stall_net_s == pytest.approx(0.35, abs=0.42)
    assert figures.stall_net_s < figures.stall_s - 1.0


def test_a_survivor_that_never_comes_back_is_charged_up_to_the_end_of_the_window() -> None:
    logs = {(0, 0): killed(at_s=20.0, back_s=20.7), (1, 0): stalled(11, at_s=20.0, gap_s=12.0)}
    figures = figures_of(KILL, logs, until_s=60.0)
    assert figures.gap_s == pytest.approx(1.7), "newcomer in at 20.7 s, and a second longer"
    assert figures.stall_s == pytest.approx(30.04 - 20.0 - STEP_S)


def test_the_next_kill_ends_the_window_of_the_one_before() -> None:
    second_stall = stalled(11, at_s=20.0, gap_s=0.3, until_s=24.05) + steps(11, 1000, 50, start_s=31.0)
    logs = {(0, 0): killed(at_s=20.0, back_s=20.5), (1, 0): second_stall}
    figures = figures_of(KILL, logs, until_s=24.04)
    assert figures.gap_s == pytest.approx(0.3)
    assert figures.stall_s == pytest.approx(0.2)
    assert figures.stall_window_s == pytest.approx(4.0)


def test_a_gap_outside_of_the_window_is_not_this_kills() -> None:
    events = stalled(11, at_s=20.0, gap_s=0.3, until_s=25.0)
    events += steps(11, events[-1]["step"] + 1, 100, start_s=29.0)
    logs = {(0, 0): killed(at_s=20.0, back_s=20.5), (1, 0): events}
    assert figures_of(KILL, logs, until_s=35.0).gap_s == pytest.approx(0.3)


def test_the_arrival_of_the_newcomer_counts() -> None:
    events = stalled(11, at_s=20.0, gap_s=0.2, until_s=25.0)
    events += steps(11, events[-1]["step"] + 1, 100, start_s=events[-1]["t"] + 0.8)
    logs = {(0, 0): killed(at_s=20.0, back_s=25.5), (1, 0): events}
    assert figures_of(KILL, logs, until_s=35.0).gap_s == pytest.approx(0.8)


def test_of_two_killed_groups_the_slower_one_counts_from_its_own_death() -> None:
    kill = Kill(at_s=20.04, groups={0: 20.04, 1: 20.24}, pids=frozenset({1}))
    logs = {
        (0, 0): killed(at_s=20.0, back_s=20.5),
        (1, 0): killed(at_s=20.2, back_s=21.24),
        (2, 0): stalled(12, at_s=20.0, gap_s=0.4),
    }
    assert figures_of(kill, logs, until_s=35.0).rejoin_s == pytest.approx(1.0)


def test_a_group_that_is_not_back_is_an_error_not_a_figure() -> None:
    logs = {(0, 0): steps(1, 1, 200, start_s=0.0), (1, 0): stalled(11, at_s=20.0, gap_s=0.4)}
    with pytest.raises(ValueError, match="not back"):
        figures_of(KILL, logs, until_s=35.0)


def test_failed_steps_and_steps_done_again_are_lost() -> None:
    survivor = stalled(11, at_s=20.0, gap_s=0.4)
    failed = {"event": "step", "pid": 11, "step": 201, "ok": False, "t": 20.2}
    logs = {
        (0, 0): killed(at_s=20.0, back_s=20.5),
        (1, 0): sorted([*survivor, failed], key=lambda event: float(event["t"])),
        (2, 0): stalled(12, at_s=20.0, gap_s=0.4),
    }
    assert figures_of(KILL, logs, until_s=35.0).lost_steps == 1

    # All restart from a checkpoint of step 190: what follows, up to step 201, had been done.
    again = [steps(1, 1, 201, start_s=0.0) + steps(pid, 191, 100, start_s=24.0) for pid in (2, 3)]
    figures = figures_of(KILL, {(0, 0): again[0], (1, 0): again[1]}, until_s=35.0)
    assert figures.lost_steps == 11
    assert figures.rejoin_s == pytest.approx(24.0 - 20.04), "the first step, done before or not"
    assert figures.gap_s == pytest.approx(25.1 - 20.0), "until there is progress"


def test_a_killed_lighthouse_is_watched_until_the_next_kill() -> None:
    logs = {(0, 0): stalled(1, at_s=20.0, gap_s=0.4), (1, 0): stalled(11, at_s=20.0, gap_s=6.0)}
    figures = figures_of(Kill(at_s=20.04, groups={}), logs, until_s=33.0)
    assert figures.gap_s == pytest.approx(6.0)
    assert figures.rejoin_s is None


def test_the_rate_is_that_of_undisturbed_steps() -> None:
    logs = {(0, 0): stalled(1, at_s=20.0, gap_s=5.0), (0, 1): steps(2, 1, 50, start_s=0.0)}
    assert analysis.steps_per_s(logs) == pytest.approx(1 / STEP_S)


def final(pid: int, step: int, sha: str) -> dict[str, Any]:
    return {"event": "final", "pid": pid, "step": step, "sha": sha, "t": 0.0}


def checksum(pid: int, step: int, crc: int) -> dict[str, Any]:
    return {"event": "step", "pid": pid, "step": step, "ok": True, "t": 0.0, "crc": crc}


def test_bits_are_equal_only_if_every_rank_says_the_same_of_the_same_step() -> None:
    logs = {(group, 0): [checksum(group, 10, 5), final(group, 17, "a")] for group in range(3)}
    assert analysis.equality(logs).bit_equal
    assert analysis.equality({**logs, (2, 0): [checksum(2, 10, 6), final(2, 17, "a")]}).disagreements == (10,)
    assert not analysis.equality({**logs, (2, 0): [checksum(2, 10, 5), final(2, 17, "b")]}).bit_equal
    assert not analysis.equality({**logs, (2, 0): [checksum(2, 10, 5), final(2, 18, "a")]}).bit_equal


def test_all_are_in_step_only_after_two_steps_together() -> None:
    old, new = steps(1, 1, 20, start_s=0.0), steps(2, 22, 2, start_s=2.2)
    survivor = steps(11, 1, 23, start_s=0.0)
    arguments: dict[str, Any] = {"after_s": 2.0, "not_pids": frozenset({1})}
    assert not analysis.in_step({(0, 0): old, (1, 0): survivor}, **arguments)
    assert not analysis.in_step({(0, 0): old + new[:1], (1, 0): survivor}, **arguments)
    assert analysis.in_step({(0, 0): old + new, (1, 0): survivor}, **arguments)
    assert not analysis.in_step({(0, 0): old + new, (1, 0): survivor}, beyond=22, **arguments)
    standby = {"event": "main", "pid": 3, "t": 2.4}
    assert analysis.in_step({(0, 0): [*old, *new, standby], (1, 0): survivor}, **arguments)
    assert not analysis.in_step({(0, 0): [], (1, 0): survivor}, **arguments)


QUORUM_LINE = (
    "2026-11-29T21:51:12.197 [INFO] [torchft::lighthouse] - Quorum! Quorum {{ quorum_id: 2, participants: [{}], "
    "created: Some(Timestamp {{ seconds: 1795989072, nanos: 197913951 }}) }}"
)
MEMBER = (
    'QuorumMember {{ replica_id: "{}", address: "", store_address: "", step: 0, world_size: 0, data: "" }}'
)


def test_torchfts_log_tells_a_dropped_replica_from_a_restarted_one() -> None:
    quorums = [("a:1", "b:1"), ("a:1",), ("a:1", "b:1"), ("a:1", "b:1"), ("b:1",), ("a:2", "b:1")]
    log = "\n".join(
        ["… - Received quorum request for replica a:1"]
        + [QUORUM_LINE.format(", ".join(MEMBER.format(name) for name in names)) for names in quorums]
    )
    parsed = analysis.parse_torchft_quorums(log)
    assert parsed == [frozenset(names) for names in quorums]
    assert analysis.came_back(parsed) == 1, "b:1 left and came back; a:2 is a new process"


def test_who_left_without_having_been_killed_was_dropped() -> None:
    quorums = [{"a:1", "b:1", "c:1"}, {"b:1", "c:1"}, {"a:2", "b:1"}]
    assert analysis.left_unkilled(quorums, {"a:1"}) == 1, "c:1"
    assert analysis.left_unkilled(quorums, {"a:1", "c:1"}) == 0
    assert analysis.left_unkilled([], set()) == 0
