"""The tests of recovery can fail: each runs against a build that leaves one step out, and must turn red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

RECOVERY = "tests/integration/test_recovery.py"
LIFECYCLE = "tests/integration/test_lifecycle.py"
MUTANTS = [
    ("drop_restart", f"{RECOVERY}::test_a_killed_rank_is_replaced_and_the_others_keep_their_processes"),
    ("skip_evict", f"{RECOVERY}::test_a_killed_rank_is_replaced_and_the_others_keep_their_processes"),
    ("no_tree_kill", f"{LIFECYCLE}::test_grandchildren_go_with_their_rank_and_free_their_port"),
    ("no_budget", f"{RECOVERY}::test_a_crash_loop_stops_at_its_budget_and_names_the_cause"),
    ("no_watchdog", f"{RECOVERY}::test_a_hung_rank_is_found_and_replaced"),
    ("accept_early_exit", f"{RECOVERY}::test_exit_0_before_the_end_is_a_failure_of_that_replica[3]"),
]


@pytest.fixture(scope="session")
def mutant_tree() -> Path:
    """The package as it is, with a core in which steps can be left out by name."""
    subprocess.run(
        ["cargo", "build", "--quiet", "--package", "sky-monarch-py", "--features", "mutants"],
        cwd=ROOT,
        check=True,
    )
    tree = ROOT / "target" / "mutants"
    package = tree / "sky_monarch"
    shutil.rmtree(tree, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (ROOT / "sky_monarch").iterdir():
        if entry.suffix != ".so" and entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    shutil.copy(ROOT / "target" / "debug" / "lib_core.so", package / "_core.abi3.so")
    return tree


def run_test(test: str, tree: Path, mutant: str) -> subprocess.CompletedProcess[str]:
    """Run one test against the mutant build."""
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "SKY_MONARCH_MUTANT": mutant,
        "SKY_MONARCH_TEST_PATIENCE": "0.25",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=110, check=False
    )


def test_without_a_mutant_that_build_passes(mutant_tree: Path) -> None:
    done = run_test(MUTANTS[0][1], mutant_tree, "")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=[mutant for mutant, _ in MUTANTS])
def test_the_mutant_turns_its_test_red(mutant_tree: Path, mutant: str, test: str) -> None:
    done = run_test(test, mutant_tree, mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed" in done.stdout
