"""The overhead bench's figures, from blocks whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from benches.overhead import paired


def rank(first: int, last: int, *, step_s: float, cpu_s: float) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": step, "ok": True, "t": step * step_s, "cpu": step * cpu_s}
        for step in range(first, last + 1)
    ]


def test_a_block_is_the_mean_over_its_ranks_and_only_its_own_steps() -> None:
    logs = {
        (0, 0): rank(1, 300, step_s=0.040, cpu_s=0.008),
        (1, 0): [*rank(1, 300, step_s=0.042, cpu_s=0.010), {"event": "gate", "step": 200}],
    }
    for event in logs[0, 0]:
        if event["step"] > 200:  # the next block is slow
            event["t"] += event["step"]
    block = paired.block_of(logs, 100, 200, services_cpu_s={"agent": 0.3, "controller": 0.1})
    assert block.wall_s == pytest.approx(0.041)
    assert block.wall_mean_s == pytest.approx(0.041)
    assert block.cpu_s == pytest.approx(0.009)
    assert block.services_cpu_s == pytest.approx({"agent": 0.003, "controller": 0.001})
    assert block.total_cpu_s(2) == pytest.approx(0.022)


def test_one_slow_step_moves_the_mean_and_not_the_median() -> None:
    logs = {(0, 0): rank(1, 100, step_s=0.040, cpu_s=0.008)}
    for event in logs[0, 0][60:]:
        event["t"] += 1.0
    block = paired.block_of(logs, 0, 100, services_cpu_s={})
    assert block.wall_s == pytest.approx(0.040)
    assert block.wall_mean_s == pytest.approx(0.040 + 1.0 / 94)


def test_the_first_steps_of_a_block_do_not_count() -> None:
    logs = {(0, 0): rank(1, 100, step_s=0.040, cpu_s=0.008)}
    for event in logs[0, 0][paired.SKIPPED :]:
        event["t"] += 3.0
    assert paired.block_of(logs, 0, 100, services_cpu_s={}).wall_mean_s == pytest.approx(0.040)


@pytest.mark.parametrize("damage", ["a step is missing", "a step was tried twice"])
def test_a_block_with_a_failure_in_it_is_no_figure(damage: str) -> None:
    events = rank(1, 100, step_s=0.040, cpu_s=0.008)
    if damage == "a step is missing":
        del events[50]
    else:
        events.insert(50, {**events[50], "ok": False})
    with pytest.raises(ValueError, match="at once"):
        paired.block_of({(0, 0): events}, 0, 100, services_cpu_s={})


def test_the_interval_is_students() -> None:
    found = paired.ratio_of([1.0, 1.02, 1.01, 1.03, 1.04, 1.02], [1.0] * 6)
    assert found.value == pytest.approx(1.0199, abs=1e-4)
    # log ratios: deviation 0.013873, six of them, quantile 2.5706
    assert found.high / found.value == pytest.approx(1.01466, abs=1e-4)
    assert found.value / found.low == pytest.approx(1.01466, abs=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (11, 2.201), (23, 2.069)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert paired._student(freedom) == pytest.approx(quantile, rel=0.008)


def test_what_slows_both_down_is_not_in_the_ratio() -> None:
    slower = [1.0, 1.5, 3.0, 2.0]
    found = paired.ratio_of([1.01 * s for s in slower], slower)
    assert found.value == pytest.approx(1.01)
    assert found.high - found.low < 1e-9


def test_one_round_says_nothing() -> None:
    with pytest.raises(ValueError, match="one round"):
        paired.ratio_of([1.0], [1.0])
