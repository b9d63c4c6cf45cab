"""Jobs that say something that cannot be: refused, stopped soon, or told at the end; nothing is wrong in silence."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.support.runs import FREE_RANK, Workbench, ended_at_exit
from tests.support.waiting import eventually


def test_a_script_and_a_module_that_are_not_there_are_refused_and_nothing_is_started(
    workbench: Workbench,
) -> None:
    (workbench.folder / "train.py").write_text("")
    script = workbench.cli("up", str(workbench.job("script", run="python trian.py", replicas=1)))
    assert script.returncode == 2
    assert "error: run: trian.py is not there" in script.stderr
    assert "hint: did you mean train.py?" in script.stderr
    module = workbench.job("module", run=f"{FREE_RANK} --steps 9", replicas=1, preload=["jsno"])
    refused = workbench.cli("up", str(module))
    assert refused.returncode == 2
    assert "error: preload: there is no module 'jsno'" in refused.stderr
    assert not list(workbench.home.glob("runs/*"))


def test_a_command_that_cannot_be_started_is_given_up_after_three_tries_with_the_reason(
    workbench: Workbench,
) -> None:
    recovery = {"max_restarts": 8, "backoff_s": 0.1}
    name = workbench.up(workbench.job("futile", run="cd / && trian --all", replicas=2, recovery=recovery))
    ended = workbench.wait_for_end(name)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 4)
    why = "its command cannot be started, 3 times in a row: exit code 127: bash: line 1: trian: command not found"
    assert why in ended["reason"]
    assert [group["restarts"] for group in ended["groups"]] == [2, 2], "not all of its restarts"
    shown = workbench.cli("events", name).stdout
    assert why in shown


def test_a_rehearsed_fault_that_never_happened_is_told_at_the_end(workbench: Workbench) -> None:
    job = workbench.job("late", run=f"{FREE_RANK} --steps 20", replicas=1)
    fault = "kill:replica=0,rank=0,step=500"
    done = workbench.cli("up", str(job), "--inject", fault, "--inject", "kill:replica=0,step=5")
    workbench.names.append("late")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("warning: --inject ")]
    assert [line.split(" never happened: ")[0] for line in told] == [f"warning: --inject {fault}"]
    assert "ended at step 20" in told[0]
    assert told[0] in workbench.cli("status", "late").stdout
    assert json.loads(workbench.cli("status", "late", "--json").stdout)["injections_left"] == [fault]


def test_sigterm_ends_a_run_as_ctrl_c_does_under_its_own_name_and_code(workbench: Workbench) -> None:
    job = workbench.job("term", run=f"{FREE_RANK} --steps 100000", replicas=1)
    with ended_at_exit(workbench.popen("up", str(job))) as up:
        eventually(lambda: (workbench.status("term")["step"] or 0) > 0, within_s=30)
        workbench.names.append("term")
        up.send_signal(signal.SIGTERM)
        out, err = up.communicate(timeout=30)
    assert up.returncode == 128 + signal.SIGTERM, (out, err)
    assert "SIGTERM: stopping term-" in err
    ended = workbench.status("term")
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "SIGTERM")
    assert not workbench.processes("term")


@pytest.mark.slow
def test_sigterm_at_any_moment_of_a_launch_leaves_nothing_that_is_not_listed(workbench: Workbench) -> None:
    for number in range(6):
        job = workbench.job(f"early{number}", run=f"{FREE_RANK} --steps 100000", replicas=1)
        with ended_at_exit(workbench.popen("up", str(job))) as up:
            time.sleep(0.5 + 0.25 * number)  # the moment itself is what is tested
            up.send_signal(signal.SIGTERM)
            out, err = up.communicate(timeout=60)
        assert up.returncode in {128 + signal.SIGTERM, -signal.SIGTERM}, (out, err)
        assert "Traceback" not in out + err
    workbench.cli("down", "--all")
    assert not list(workbench.home.glob("runs/*/private.json"))
