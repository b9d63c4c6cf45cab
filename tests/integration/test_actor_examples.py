"""The examples of the actor API do what their heads say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/actors"
RUN_BY_A_TEST = {
    "async_rl.py",
    "data_parallel.py",
    "fsdp.py",
    "lose_a_rank.py",
    "parameter_server.py",
    "ping_pong.py",
    "replica_groups.py",
    "tensor_parallel.py",
    "two_hosts.py",
}


def run(example: str, *arguments: str, within_s: float = 100) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def quiet(example: str, *arguments: str) -> str:
    out, errors = run(example, *arguments)
    assert errors == ""
    return out


def test_each_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN_BY_A_TEST


def test_two_processes_play_ping_pong() -> None:
    out = quiet("ping_pong.py", "--hits", "100")
    assert out.startswith("ping\npong\nping\npong\n100 hits by 2 processes")


def test_the_work_goes_on_after_a_rank_was_lost_and_comes_out_right() -> None:
    out, errors = run("lose_a_rank.py")
    assert re.search(r"^step 25: adders\[3\] .*SIGKILL", out, re.MULTILINE), out
    assert "as it should be\n5 steps were done again" in out
    assert errors.count("SIGKILL") == 1, "one event a failure"


@pytest.mark.slow
def test_two_hosts_play_a_game_and_one_loses_a_player() -> None:
    out, errors = run("two_hosts.py")
    assert errors.count("SIGKILL") == 1, "one event a failure"
    assert re.search(r"^players\[3\] is dead: .* on local-1, .*SIGKILL", out, re.MULTILINE), out
    assert re.search(
        r"^local-0, local-1 x 2: pi is about 3\.1\d; 1 round was lost with a rank$", out, re.MULTILINE
    ), out


@pytest.mark.slow
def test_workers_find_the_weights_through_a_parameter_server() -> None:
    out = quiet("parameter_server.py")
    assert out.startswith("600 gradients of 3 workers")
    assert float(out.rpartition(" ")[2]) < 0.01


@pytest.mark.slow
def test_reinforcement_learning_learns_while_all_its_parts_run_at_once() -> None:
    out = quiet("async_rl.py", "--seconds", "30")
    first, best, updates = map(int, re.search(r"from (\d+) to (\d+) steps, in (\d+) updates", out).groups())
    # Pushing at random a pole falls after 9 steps with these positions; 200 is the most that is counted.
    assert first < 20
    assert best >= 150
    assert updates > 10


@pytest.mark.slow
@pytest.mark.torch
def test_data_parallel_ranks_learn_with_the_same_weights() -> None:
    out = quiet("data_parallel.py")
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) after", out).groups())
    assert last < first / 10
    assert "all ranks have the same weights" in out


@pytest.mark.slow
@pytest.mark.torch
def test_tensor_parallel_ranks_compute_what_one_process_would() -> None:
    out = quiet("tensor_parallel.py")
    assert out.startswith("2 ranks with [321, 321] of 641 numbers")
    assert float(re.search(r"at most (\S+) from", out)[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.torch
def test_fully_sharded_ranks_have_half_of_the_weights_each_and_bring_back_what_they_trained() -> None:
    out = quiet("fsdp.py", "--steps", "60")
    shares = [
        int(number) for number in re.match(r"2 ranks with \[(\d+), (\d+)\] of 641 numbers", out).groups()
    ]
    assert sum(shares) == 641
    assert max(shares) < 0.6 * 641
    first, last, here = map(
        float, re.search(r"loss ([\d.]+) at first, ([\d.]+) after .*; ([\d.]+) in this", out).groups()
    )
    assert last < first / 5
    assert here < first / 5


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_replica_group_is_killed_and_all_end_with_the_same_weights() -> None:
    out, errors = run("replica_groups.py", "--steps", "300", within_s=380)
    assert int(re.search(r"replacement's first step was (\d+)", out)[1]) > 10
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) at the end", out).groups())
    assert last < first
    assert "all groups have the same weights" in out
    assert errors.count("SIGKILL") >= 1
