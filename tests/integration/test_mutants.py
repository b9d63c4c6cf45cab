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
STANDBY = "tests/integration/test_standby.py"
CONTROLLER = "tests/integration/test_controller_process.py"
LIFECYCLE = "tests/integration/test_lifecycle.py"
KILLED = f"{RECOVERY}::test_a_killed_rank_is_replaced_and_the_others_keep_their_processes"

CHECKPOINTS = "tests/integration/test_checkpoint_kills.py"
KILLED_SAVES = f"{CHECKPOINTS}::test_killed_before_any_operation_of_a_save_a_whole_checkpoint_is_loaded"

RUNS = (
    "tests/integration/test_checkpoint_runs.py"
    "::test_a_save_that_fails_is_an_event_and_all_groups_killed_at_once_go_on_from_the_last_good_one"
)
ORPHANS = "tests/integration/test_orphans.py::test_a_killed_agent_is_replaced_and_no_rank_lives_twice"

# What is left out, the test that has to notice, and a word of what it then says.
MUTANTS = [
    ("drop_restart", KILLED, "test_a_killed_rank"),
    ("skip_evict", KILLED, "test_a_killed_rank"),
    ("skip_evict", f"{RECOVERY}::test_survivors_commit_while_the_victim_is_away", "not within 10 s"),
    ("drop_restart", f"{RECOVERY}::test_every_rank_of_the_group_is_replaced_when_one_dies", "not within"),
    ("no_budget", f"{RECOVERY}::test_the_run_goes_on_degraded_while_min_replicas_hold", "not within"),
    (
        "no_watchdog",
        f"{RECOVERY}::test_a_rank_that_hangs_while_it_says_that_it_waits_is_not_excused_for_ever",
        "not within",
    ),
    (
        "forget_service",
        f"{LIFECYCLE}::test_the_head_agent_brings_its_services_back[lighthouse]",
        "not within",
    ),
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
    (
        "door_gives_up",
        "tests/integration/test_door.py::test_a_rank_without_retries_outlives_the_lighthouse_that_it_asks",
        "nobody was lost",
    ),
    ("no_watchdog", f"{RECOVERY}::test_a_hung_rank_is_found_and_replaced", "not within"),
    ("blame_waiting", f"{RECOVERY}::test_a_hung_rank_is_found_and_replaced", "who waits is no culprit"),
    (
        "accept_early_exit",
        "tests/integration/test_exits.py::test_exit_0_before_the_end_is_a_failure_of_that_replica[1:0:exit=0]",
        "not within",
    ),
    (
        "promote_nobody",
        f"{STANDBY}::test_a_standby_that_ran_ahead_becomes_the_rank_and_was_nobody_before",
        "not within",
    ),
    (
        "run_ahead_again",
        f"{STANDBY}::test_a_script_that_takes_its_process_down_ahead_is_not_run_ahead_again",
        "assert",
    ),
    (
        "no_store_close",
        "tests/integration/test_lighthouse_stores.py::test_the_death_of_the_primary_in_a_rendezvous_stalls_nobody",
        "they stalled for",
    ),
    (
        "blame_pauses",
        "tests/integration/test_lighthouse_silence.py::test_a_lighthouse_that_was_stopped_drops_nobody[10.0]",
        "assert counters[",
    ),
    (
        "kill_first",
        f"{LIFECYCLE}::test_fifty_restarts_end_with_term_before_kill_and_leave_no_zombie",
        "TERM comes first",
    ),
    (
        "forget_service",
        f"{LIFECYCLE}::test_the_head_agent_brings_its_services_back[controller_pid]",
        "has not answered",
    ),
    (
        "blame_own_pause",
        f"{RECOVERY}::test_a_supervisor_that_was_paused_blames_nobody_when_it_comes_back[agent]",
        "nobody was restarted",
    ),
    ("keep_orphans", ORPHANS, "not within"),
]

# The same in Python: a module, what is replaced in it, by what; the test and its word.
PYTHON_MUTANTS = [
    # Visible before it is complete.
    (
        "training/checkpoint/folder.py",
        '        tmp = self.path / f"{_TMP}{name}"\n        tmp.mkdir',
        "        tmp = self.path / name\n        tmp.mkdir",
        KILLED_SAVES,
        "assert",
    ),
    # The one before is removed first.
    (
        "training/checkpoint/folder.py",
        "        for it in complete:\n            if it.name == newest or",
        "        for it in complete:\n            self.discard(it.name)\n            if it.name == newest or",
        f"{CHECKPOINTS}::test_writers_that_know_nothing_of_each_other_leave_whole_checkpoints",
        "assert",
    ),
    (
        "training/checkpoint/saving.py",
        "            self._decline(self._declined.popleft())",
        "            self._declined.popleft()",
        f"{CHECKPOINTS}::test_a_rank_that_is_still_busy_costs_its_group_that_checkpoint_only",
        "nobody waits",
    ),
    (
        "training/checkpoint/contents.py",
        "like = param if isinstance(param, DTensor)",
        "like = None if isinstance(param, DTensor)",
        f"{CHECKPOINTS}::test_the_ranks_of_a_group_save_their_shards_together_and_load_them_in_groups_of_any_size",
        "assert",
    ),
    (
        "training/checkpoint/saving.py",
        "                self.folder.verify(it)\n",
        "",
        "tests/unit/test_checkpoint.py::test_a_damaged_one_is_named_and_the_one_before_is_taken[a bit]",
        "failed",
    ),
    (
        "training/checkpoint/store.py",
        "        upload_id = journal.get(file)",
        "        upload_id = None",
        "tests/integration/test_checkpoint_store.py::test_the_next_process_uploads_only_the_parts_that_are_missing",
        "assert [1, 2, 3] == [2, 3]",
    ),
    (
        "training/state.py",
        "        manager.load_state_dict(parts[MANAGER])\n        return True",
        "        return False",
        "tests/integration/test_session.py::test_all_groups_go_on_from_the_newest_checkpoint",
        "assert",
    ),
    (
        "controller/controller.py",
        "                for row in news:\n",
        "                for row in ():\n",
        RUNS,
        "not within",
    ),
    ("keeper.py", "_MOST_SHORT_LIVES = 10", "_MOST_SHORT_LIVES = 1", ORPHANS, "not within"),
    (
        "controller/controller.py",
        "        self._replay()\n",
        "",
        f"{CONTROLLER}::test_a_killed_controller_comes_back_and_adopts_the_live_groups",
        "assert",
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


def link_all_but(module: Path, source: Path, target: Path) -> None:
    """Make ``target`` a folder of links into ``source``, with a copy of the one ``module`` in it."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.suffix == ".so" or entry.name == "__pycache__":
            continue
        if entry.name != module.parts[0]:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            link_all_but(Path(*module.parts[1:]), entry, target / entry.name)
        else:
            shutil.copy(entry, target / entry.name)


def run_with_defect(
    test: str,
    folder: Path,
    core: Path,
    module: str,
    old: str,
    new: str,
    more_env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one test with the package as it is, but with that core, and with a replacement in one module."""
    package = folder / "sky_monarch"
    link_all_but(Path(module), ROOT / "sky_monarch", package)
    (package / "_core.abi3.so").symlink_to(core)
    text = (package / module).read_text()
    assert old in text
    (package / module).write_text(text.replace(old, new, 1))
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "SKY_MONARCH_TEST_PATIENCE": "0.25",
        **(more_env or {}),
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=110, check=False
    )


def run_test(test: str, folder: Path, core: Path, mutant: str) -> subprocess.CompletedProcess[str]:
    """Run one test with a core whose agent has the defect."""
    # The variable itself cannot be handed down: no exported one of ours reaches the agent.
    head = "from __future__ import annotations\n"
    defect = f"{head}import os\nos.environ['SKY_MONARCH_MUTANT'] = {mutant!r}\n"
    # Lighthouses that a test starts by itself have it, though.
    return run_with_defect(test, folder, core, "agent.py", head, defect, {"SKY_MONARCH_MUTANT": mutant})


# By defect and test.
Outcomes = dict[tuple[str, str], "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def outcomes(mutable_core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """All of them, three at a time: for the most part they wait."""
    with ThreadPoolExecutor(3) as pool:
        make = tmp_path_factory.mktemp
        yield {
            (mutant, test): pool.submit(run_test, test, make("mutant"), mutable_core, mutant)
            for mutant, test, _ in [("", KILLED, ""), *MUTANTS]
        } | {
            (module, test): pool.submit(run_with_defect, test, make("mutant"), mutable_core, module, old, new)
            for module, old, new, test, _ in PYTHON_MUTANTS
        }


@pytest.mark.timeout(300)
def test_without_a_defect_that_build_passes(outcomes: Outcomes) -> None:
    done = outcomes["", KILLED].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutant", "test", "words"),
    [*MUTANTS, *((module, test, words) for module, _, _, test, words in PYTHON_MUTANTS)],
)
def test_the_defect_turns_its_test_red(outcomes: Outcomes, mutant: str, test: str, words: str) -> None:
    done = outcomes[mutant, test].result()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout, done.stdout
    assert words in done.stdout, done.stdout
