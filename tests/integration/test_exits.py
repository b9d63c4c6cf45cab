"""How a rank or a setup script ends is what everybody is told: state, rank, exit code of the command."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.runs import FREE_RANK, Workbench, generation_of
from tests.support.waiting import PATIENCE


def some_slow(cases: Iterable[str], *slow: str) -> list[Any]:
    """Each starts a run: for most changes a part of them does."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]


ONE = "os.environ['REPLICA_GROUP_ID'] == '1'"

# What a rank runs, how many replicas fail, and how `status` shows it: (code, signal).
ENDS = {
    "one exits 7": (f'{sys.executable} -c "import os, sys; sys.exit(7 if {ONE} else 0)"', 1, (7, None)),
    "all exit 7": (f'{sys.executable} -c "import sys; sys.exit(7)"', 2, (7, None)),
    "in a pipe": ("false | tee x", 2, (1, None)),
    "a signal": (f'{sys.executable} -c "import os; os.kill(os.getpid(), 11)"', 2, (None, signal.SIGSEGV)),
    "no such program": ("no-such-program-here", 2, None),
    "the last of a script": ("echo before\nexit 9", 2, (9, None)),
}


@pytest.mark.parametrize("case", some_slow(ENDS, "all exit 7", "in a pipe", "the last of a script"))
def test_a_failure_is_shown_per_rank_and_fails_the_run_and_the_command(
    workbench: Workbench, case: str
) -> None:
    run, failing, end = ENDS[case]
    # With a `setup`, which might bring what is missing: else `up` would refuse it.
    setup = "true" if end is None else ""
    job = workbench.job(
        "ends", run=run, setup=setup, replicas=2, min_replicas=2, recovery={"max_restarts": 0}
    )
    done = workbench.cli("up", str(job))
    assert done.returncode == 4, (done.returncode, done.stdout, done.stderr)
    status = workbench.status("ends")
    assert (status["state"], status["exit_code"]) == ("FAILED", 4)
    assert "FAILED ends-" in done.stdout
    assert [one["name"] for one in json.loads(workbench.cli("status", "--all", "--json").stdout)] == ["ends"]
    if end is None:
        assert "no-such-program-here" in status["reason"] + done.stdout
        return
    exits = [(rank["exit"] or {}) for group in status["groups"] for rank in group["ranks"]]
    # The run fails with the first group that is given up; the others may be ended with it.
    roots = [exit_ for exit_ in exits if exit_ and not exit_["collateral"]]
    bad = [(exit_["code"], exit_["signal"]) for exit_ in roots if exit_["code"] != 0]
    assert bad, exits
    assert set(bad) == {end}
    assert len(bad) <= failing
    shown = f"exited with code {end[0]}" if end[1] is None else f"killed by {signal.Signals(end[1]).name}"
    assert f"rank 0: {shown}" in workbench.cli("status", "ends").stdout
    assert shown in done.stdout


# A setup, its exit code as `status` shows it, and what is said.
SETUPS = {
    "exit code": ("for i in $(seq 30); do echo line $i >&2; done; echo boom >&2; exit 3", 3, "boom"),
    "in a pipe": ("false | tee x", 1, "setup"),
    "a command that is not there": ("echo first\nno-such-program-here", 127, "no-such-program-here"),
}


@pytest.mark.parametrize("case", some_slow(SETUPS, "in a pipe"))
def test_a_failed_setup_is_named_once_and_nothing_is_started(workbench: Workbench, case: str) -> None:
    setup, code, words = SETUPS[case]
    job = workbench.job("setup", run="touch started", setup=f"sleep 300 & {setup}")
    done = workbench.cli("up", str(job))
    shown = done.stdout + done.stderr
    assert done.returncode == 5, shown
    assert words in shown
    assert f"exited with code {code}" in shown
    if code == 3:
        assert "line 12" in shown, "the last 20 lines are shown"
        assert "line 11\n" not in done.stdout[done.stdout.index("FAILED_SETUP") :], "and no more"
    status = workbench.status("setup")
    assert status["state"] == "FAILED_SETUP"
    assert status["setup"]["exit_code"] == code
    assert not (workbench.folder / "started").exists()
    kinds = [event["event"] for event in workbench.events("setup")]
    assert kinds.count("setup_started") == 1
    assert "rank_spawned" not in kinds
    assert not workbench.processes("setup"), "what setup left in the background is gone too"


def test_a_setup_without_an_end_is_ended_at_its_limit(workbench: Workbench) -> None:
    job = workbench.job("slow", run="true", setup="echo waiting; sleep 300", setup_timeout_s=1)
    done = workbench.cli("up", str(job), timeout_s=60 * PATIENCE)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "waiting" in done.stdout
    status = workbench.status("slow")
    assert status["state"] == "FAILED_SETUP"
    assert "time limit" in status["reason"]
    assert not workbench.processes("slow")


@pytest.mark.parametrize("deed", some_slow(["1:0:exit=0", "1/1:3:quit=0"], "1/1:3:quit=0"))
def test_exit_0_before_the_end_is_a_failure_of_that_replica(workbench: Workbench, deed: str) -> None:
    ranks = 2 if "/" in deed else 1
    job = workbench.job("early", run=f"{FREE_RANK} --steps 60 --do {deed}", ranks_per_replica=ranks)
    name = workbench.up(job)
    after = workbench.wait_for_end(name, within_s=60)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert [generation_of(after, replica) for replica in range(3)] == [1, 2, 1]
    (recovery,) = after["recoveries"]
    # Reports are state: the last one may not have been sent when the process quit.
    assert re.search(rf"rank {ranks - 1} exited with code 0 before the end \([0-3]/60\)", recovery["cause"])
    assert after["step"] == 60
