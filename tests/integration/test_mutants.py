"""The tests of recovery can fail: each runs against a build that leaves one step out, and must turn red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.runs import ROOT

RECOVERY = "tests/integration/test_recovery.py"
LIFECYCLE = "tests/integration/test_lifecycle.py"
KILLED = f"{RECOVERY}::test_a_killed_rank_is_replaced_and_the_others_keep_their_processes"

# What is left out, the test that has to notice, and a word of what it then says.
MUTANTS = [
    ("drop_restart", KILLED, "test_a_killed_rank"),
    ("skip_evict", KILLED, "test_a_killed_rank"),
    (
        "no_tree_kill",
        "tests/integration/test_ports.py::test_grandchildren_go_with_their_rank_and_free_their_port",
        "assert",
    ),
    (
        "no_budget",
        f"{RECOVERY}::test_a_crash_loop_stops_at_its_budget_and_names_the_cause",
        "not within",
    ),
    ("no_watchdog", f"{RECOVERY}::test_a_hung_rank_is_found_and_replaced", "not within"),
    ("blame_waiting", f"{RECOVERY}::test_a_hung_rank_is_found_and_replaced", "who waits is no culprit"),
    (
        "accept_early_exit",
        "tests/integration/test_exits.py::test_exit_0_before_the_end_is_a_failure_of_that_replica[1:0:exit=0]",
        "not within",
    ),
    (
        "no_store_close",
        "tests/integration/test_lighthouse_stores.py::test_the_death_of_the_primary_in_a_rendezvous_stalls_nobody",
        "they stalled for",
    ),
    (
        "blame_pauses",
        "tests/integration/test_lighthouse_silence.py::test_a_lighthouse_that_was_stopped_drops_nobody[10.0]",
        "'silent': 0",
    ),
    (
        "kill_first",
        f"{LIFECYCLE}::test_fifty_restarts_end_with_term_before_kill_and_leave_no_zombie",
        "TERM comes first",
    ),
]


@pytest.fixture(scope="session")
def mutable_core() -> Path:
    """A core in which steps can be left out by name."""
    subprocess.run(
        ["cargo", "build", "--quiet", "--package", "sky-monarch-py", "--features", "mutants"],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    # The next ordinary build writes the same file: what runs here is a copy.
    core = ROOT / "target" / "mutants" / "_core.abi3.so"
    core.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "target" / "debug" / "lib_core.so", core)
    return core


def run_test(test: str, folder: Path, core: Path, mutant: str) -> subprocess.CompletedProcess[str]:
    """Run one test with the package as it is, but with that core, whose agent has the defect."""
    package = folder / "sky_monarch"
    package.mkdir()
    for entry in (ROOT / "sky_monarch").iterdir():
        if entry.suffix != ".so" and entry.name not in {"__pycache__", "agent.py"}:
            (package / entry.name).symlink_to(entry)
    (package / "_core.abi3.so").symlink_to(core)
    # The variable itself cannot be handed down: no exported one of ours reaches the agent.
    agent = (ROOT / "sky_monarch" / "agent.py").read_text()
    head = "from __future__ import annotations\n"
    assert head in agent
    defect = f"{head}import os\nos.environ['SKY_MONARCH_MUTANT'] = {mutant!r}\n"
    (package / "agent.py").write_text(agent.replace(head, defect, 1))
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "SKY_MONARCH_MUTANT": mutant,  # for lighthouses that a test starts by itself
        "SKY_MONARCH_TEST_PATIENCE": "0.25",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=110, check=False
    )


Outcomes = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def outcomes(mutable_core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """All of them, three at a time: for the most part they wait."""
    with ThreadPoolExecutor(3) as pool:
        yield {
            mutant: pool.submit(run_test, test, tmp_path_factory.mktemp("mutant"), mutable_core, mutant)
            for mutant, test, _ in [("", KILLED, ""), *MUTANTS]
        }


@pytest.mark.timeout(300)
def test_without_a_defect_that_build_passes(outcomes: Outcomes) -> None:
    done = outcomes[""].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "words"), [(mutant, words) for mutant, _, words in MUTANTS])
def test_the_defect_turns_its_test_red(outcomes: Outcomes, mutant: str, words: str) -> None:
    done = outcomes[mutant].result()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout, done.stdout
    assert words in done.stdout, done.stdout
