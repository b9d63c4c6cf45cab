"""The chaos bench's schedule and figures, from logs whose answer is known."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from benches.chaos import figures, schedule
from benches.chaos.figures import BATCH, Strike
from benches.recovery import analysis

STEP_S = 0.1


def steps(pid: int, first: int, count: int, *, start_s: float, gained: int = 1) -> list[dict[str, Any]]:
    """Commits of one process, one each ``STEP_S``; with the first it gained ``gained``."""
    return [
        {
            "event": "step",
            "pid": pid,
            "step": first + i,
            "ok": True,
            "gained": gained if i == 0 else 1,
            "t": start_s + i * STEP_S,
        }
        for i in range(count)
    ]


def together(groups: int, count: int, *, first: int = 1, start_s: float = 0.0, pid: int = 10) -> Any:
    """Groups that commit the same steps, each a little later than the one before."""
    return {
        (group, 0): steps(pid + group, first, count, start_s=start_s + 0.001 * group)
        for group in range(groups)
    }


def test_one_seed_draws_one_schedule_in_which_each_kind_comes_before_any_comes_again() -> None:
    drawn = schedule.draw(seed=7, seconds=600, every_s=15, groups=4)
    assert drawn == schedule.draw(seed=7, seconds=600, every_s=15, groups=4)
    assert drawn != schedule.draw(seed=8, seconds=600, every_s=15, groups=4)
    assert 36 <= len(drawn) <= 44, "about one each 15 s"
    assert Counter(failure.kind for failure in drawn[:7]) == Counter([*schedule.KINDS, "kill"])
    gaps_s = [after.at_s - before.at_s for before, after in itertools.pairwise(drawn)]
    assert min(gaps_s) >= 10
    assert max(gaps_s) <= 20
    assert drawn[-1].at_s <= 600 - 7.5, "what fails last has time to show what it costs"


def test_a_failure_names_as_many_groups_as_it_hits() -> None:
    drawn = schedule.draw(seed=3, seconds=3600, every_s=15, groups=4)
    wanted = {"two": 2, "lighthouse": 0, "controller": 0}
    for failure in drawn:
        assert len(set(failure.victims)) == len(failure.victims) == wanted.get(failure.kind, 1), failure
        assert set(failure.victims) <= set(range(4))
    assert {failure.kind for failure in drawn} == set(schedule.KINDS)


def test_a_short_run_has_failures_too_and_only_of_the_kinds_asked_for() -> None:
    drawn = schedule.draw(seed=7, seconds=60, every_s=15, groups=4, kinds=("kill", "hang"))
    assert 3 <= len(drawn) <= 5
    assert {failure.kind for failure in drawn} == {"kill", "hang"}


def test_each_group_in_a_step_counts_its_batch_and_one_that_heals_does_not() -> None:
    logs = together(3, 100)
    newcomer = steps(2, 51, 50, start_s=5.003, gained=51)
    got = figures.harvest({**logs, (3, 0): newcomer}, -1.0, 11.0)
    assert got.steps == 100
    assert got.samples == BATCH * (300 + 49), "the newcomer's first step is its donor's work"
    assert got.samples_per_s == pytest.approx(BATCH * 349 / 12)
    assert got.groups_per_step == pytest.approx(3.49)
    assert got.undone == 0
    assert got.longest_stall_s == pytest.approx(11.0 - 9.903)


def test_only_what_is_committed_in_time_counts() -> None:
    got = figures.harvest(together(2, 100), 1.95, 6.05)
    assert got.steps == 41, "those of 2.0 to 6.0 s"
    assert got.last_step == 61
    assert got.seconds == pytest.approx(4.1)


def test_what_was_committed_before_all_began_anew_is_undone() -> None:
    before, after = together(2, 80), together(2, 50, start_s=15.0, pid=20)
    logs = {who: before[who] + after[who] for who in before}
    assert [(each.at_s, each.step) for each in figures.rollbacks(logs)] == [(15.0, 1)]
    got = figures.harvest(logs, -1.0, 30.0)
    assert got.steps == 50
    assert got.samples == BATCH * 100
    assert got.undone == 30, "steps 51 to 80; 1 to 50 were done again"
    assert got.last_step == 50
    assert figures.lost_steps(logs, -1.0, 30.0) == [50, 50]


def test_a_process_that_logs_its_step_after_a_long_stop_undoes_nothing() -> None:
    logs = together(3, 300)
    stopped = [event for event in logs[2, 0] if event["step"] <= 100]
    stopped[-1]["t"] += 15.0
    stopped += steps(12, 260, 41, start_s=25.902, gained=160)
    got = figures.harvest({**logs, (2, 0): stopped}, -1.0, 40.0)
    assert figures.rollbacks({**logs, (2, 0): stopped}) == []
    assert got.undone == 0
    assert got.samples == BATCH * (600 + 100 + 40)


def test_checksums_of_what_was_undone_are_not_compared() -> None:
    before, after = together(2, 80), together(2, 100, start_s=15.0, pid=20)
    before[0, 0][69]["crc"] = 1
    after[1, 0][69]["crc"] = 2
    logs = {who: before[who] + after[who] for who in before}
    assert analysis.equality(logs).disagreements == (70,)
    assert analysis.equality(figures.lasting(logs)).disagreements == ()


def test_a_group_is_back_with_a_commit_of_another_process_or_once_it_has_healed() -> None:
    killed = steps(1, 1, 50, start_s=0.0) + steps(2, 60, 20, start_s=6.0, gained=60)
    stopped = (
        steps(3, 1, 50, start_s=0.0) + steps(3, 51, 1, start_s=9.0) + steps(3, 90, 5, start_s=9.5, gained=39)
    )
    logs = {(0, 0): killed, (1, 0): stopped}
    strikes = [
        Strike(at_s=5.0, group=0, pid=1),
        Strike(at_s=5.0, group=1, pid=3, deadly=False),
        Strike(at_s=9.8, group=1, pid=3),
    ]
    assert figures.rejoins_s(strikes, logs) == pytest.approx([1.0, 4.5]), "the last one never came back"


def test_restarts_of_what_nobody_hit_are_collateral() -> None:
    hits = [
        Strike(at_s=1.0, group=0, pid=1),
        Strike(at_s=2.0, group=0, pid=1),
        Strike(at_s=3.0, group=1, pid=2, deadly=False),
    ]
    assert figures.collateral(4, hits) == 3, "a process dies once, and one that was only stopped does not"


def test_a_script_that_failed_as_it_was_told_is_a_hit() -> None:
    logs = {(2, 0): [*steps(5, 1, 3, start_s=0.0), {"event": "exit", "pid": 5, "t": 0.3}]}
    assert figures.failed_scripts(logs) == [Strike(at_s=0.3, group=2, pid=5)]


def test_who_was_stopped_and_came_back_was_dropped_rightly_once() -> None:
    names = {"a:1": 0, "b:1": 1}
    quorums = [names, {"a:1": 0}, names, {"a:1": 0}, names]
    assert figures.false_drops(quorums, {}, dead=()) == 2
    assert figures.false_drops(quorums, {1: 1}, dead=()) == 1
    assert figures.false_drops(quorums, {0: 1, 1: 3}, dead=()) == 0
    replaced = [names, {"a:1": 0}, {"a:1": 0, "b:2": 1}]
    assert figures.false_drops(replaced, {}, dead=()) == 1, "b:1 was alive"
    assert figures.false_drops(replaced, {}, dead={"b:1"}) == 0


def test_losses_are_compared_at_the_same_steps() -> None:
    undisturbed = {step: 1.0 / step for step in range(50, 1050, 50)}
    disturbed = {step: 2.0 / step for step in range(50, 550, 50)}
    ours = figures.last_loss(disturbed, undisturbed)
    theirs = figures.last_loss(undisturbed, disturbed)
    assert ours is not None
    assert theirs is not None
    assert ours / theirs == pytest.approx(2.0)
    assert figures.last_loss(undisturbed) == pytest.approx(sum(1 / s for s in range(800, 1050, 50)) / 5)
    assert figures.last_loss({}) is None


def test_the_loss_of_what_was_undone_is_forgotten() -> None:
    before, after = together(2, 80), together(2, 60, start_s=15.0, pid=20)
    for events, loss in ((before, 0.5), (after, 0.9)):
        events[0, 0][49]["held_out"] = loss
    before[1, 0][74]["held_out"] = 0.4
    logs = {who: before[who] + after[who] for who in before}
    assert figures.held_out(logs, -1.0, 30.0) == {50: 0.9}
