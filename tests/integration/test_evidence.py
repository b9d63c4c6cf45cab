"""What a failure leaves: the exception with the user's line, numbers of memory, the place of a hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import stacks
from tests.support.runs import Workbench, pid_of
from tests.support.waiting import eventually

LIMIT_S = 4
# Each replica fails in its own way in its first generation, and finishes in its second.
FAILS = """
import json, os, signal, sys, time
from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.environment import RankEnvironment

def train(link, who):
    if who == 2:  # before its first step: that may take as long as it takes
        hoard = bytearray(300 << 20)
        hoard[:: 4096] = b"x" * len(hoard[:: 4096])
    for step in range(1, 4):
        time.sleep(0.02)
        link.committed(step, 1, 1, {})
    if os.environ["SKY_MONARCH_GENERATION"] != "1":
        return
    if who == 0:
        json.loads("{")
    if who == 1:
        lost_in_thought()
    if who == 3:
        signal.signal(44, signal.SIG_DFL)
        lost_in_thought()
    if who == 2:
        os.kill(os.getpid(), signal.SIGKILL)

def lost_in_thought():
    time.sleep(3600)

link = AgentLink(RankEnvironment.read(), target_step=3, on_dead=lambda _: None, wait_limits_s=(60.0, 2.0))
train(link, int(os.environ["REPLICA_GROUP_ID"]))
link.done(3)
link.released.wait(60)
link.close()
"""


def line_of(source: str, text: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


@pytest.fixture
def failed(workbench: Workbench) -> tuple[str, dict[int, dict[str, Any]], str]:
    """Name of a run that has recovered from four failures, its records by replica, and its script."""
    script = workbench.folder / "fails.py"
    script.write_text(FAILS)
    job = workbench.job(
        "fails",
        run=f"{sys.executable} {script}",
        replicas=4,
        recovery={"progress_limit_s": LIMIT_S, "startup_limit_s": 60},
    )
    name = workbench.up(job)
    after = workbench.wait_for_end(name, within_s=60)
    assert after["state"] == "SUCCEEDED", after["reason"]
    assert stacks.SIGNAL == 44
    return name, {record["replica"]: record for record in after["recoveries"]}, str(script)


def test_each_failure_says_where_and_with_what_numbers(
    workbench: Workbench, failed: tuple[str, dict[int, dict[str, Any]], str]
) -> None:
    name, records, script = failed
    raised, hung, killed, deaf = (records[replica] for replica in range(4))
    assert raised["exception"].startswith("json.decoder.JSONDecodeError: Expecting property name"), raised
    assert raised["where"] == f"{script}:{line_of(FAILS, 'json.loads(')}", "not the line in json"
    assert hung["cause"] == f"no commit within {LIMIT_S} s"
    assert hung["where"] == f"{script}:{line_of(FAILS, 'time.sleep(3600)')} in lost_in_thought", hung
    assert hung["hung"]["state"].startswith("S")
    assert killed["cause"] == "rank 0 was killed by SIGKILL"
    assert 300 << 20 < killed["memory"]["peak_bytes"] < killed["memory"]["limit_bytes"]
    events = workbench.events(name)
    assert deaf["cause"] == f"no commit within {LIMIT_S} s", "it is not ended by being asked"
    assert deaf["where"] is None
    assert deaf["hung"]["native"].split()[1].startswith("python"), deaf["hung"]
    (dump,) = [event for event in events if event["event"] == "hung" and event["replica"] == 1]
    assert (dump["replica"], dump["rank"], dump["generation"]) == (1, 0, 1)
    assert any("in train" in line for line in dump["stacks"]), "the way there"
    assert any("agent_link.py" in line for line in dump["stacks"]), "the other threads, too"
    assert len(dump["threads"]) >= 2
    assert not list((workbench.run_folder(name) / "evidence").iterdir()), "what was told needs no file"
    said = workbench.cli("status", name).stdout
    for text in ("in lost_in_thought", "JSONDecodeError", " at most, ", "rank 0 hung, S (sleeping)"):
        assert text in said, said


GREEDY = """
import os, time
from pathlib import Path

if os.environ["RANK"] == "1" and os.environ["SKY_MONARCH_GENERATION"] == "1":
    while not Path("limited").exists():
        time.sleep(0.02)
    hoard = bytearray(256 << 20)
    hoard[:: 4096] = b"x" * len(hoard[:: 4096])
elif os.environ["SKY_MONARCH_GENERATION"] == "1":
    time.sleep(3600)
"""


LIMITS = [
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
]


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group of 64 MiB."""
    for mount, limit in LIMITS:
        if not (mount / "cgroup.procs").exists():
            continue  # version 1 has its own mount for memory
        group = mount / f"sky-monarch-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(64 << 20))
                yield group
                eventually(lambda group=group: not (group / "cgroup.procs").read_text())
                return
        finally:
            group.rmdir()
    pytest.skip("nobody may make a control group for memory here")


def test_a_rank_that_the_kernel_ends_for_its_memory_is_the_cause_and_its_group_is_not(
    workbench: Workbench, small_memory: Path
) -> None:
    script = workbench.folder / "greedy.py"
    script.write_text(GREEDY)
    job = workbench.job("greedy", run=f"{sys.executable} {script}", replicas=1, ranks_per_replica=2)
    name = workbench.up(job)
    before = eventually(
        lambda: (now := workbench.status(name)) and pid_of(now, 0, 0) and pid_of(now, 0, 1) and now
    )
    (small_memory / "cgroup.procs").write_text(str(pid_of(before, 0, 1)))
    (workbench.folder / "limited").touch()
    after = workbench.wait_for_end(name, within_s=60)
    assert after["state"] == "SUCCEEDED", after["reason"]
    (record,) = after["recoveries"]
    assert record["cause"] == "rank 1 was killed by SIGKILL, out of memory"
    assert (record["rank"], record["collateral"]) == (1, [0])
    assert 8 << 20 < record["memory"]["peak_bytes"] < 80 << 20
    said = workbench.cli("status", name).stdout
    assert "out of memory" in said
    assert "it had " in said
    assert "ended with it: rank 0" in said


RECORDED = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    sys.stderr = sys.stdout = open("/dev/null", "w")
    raise RuntimeError("device-side assert")

main()
"""


@pytest.mark.torch
def test_a_script_decorated_with_record_tells_its_exception_though_it_prints_nothing(
    workbench: Workbench,
) -> None:
    script = workbench.folder / "recorded.py"
    script.write_text(RECORDED)
    job = workbench.job(
        "recorded", run=f"{sys.executable} {script}", replicas=1, recovery={"max_restarts": 0}
    )
    after = workbench.wait_for_end(workbench.up(job), within_s=60)
    (record,) = after["recoveries"]
    assert record["exception"] == "RuntimeError: device-side assert"
    assert record["where"] == f"{script}:{line_of(RECORDED, 'raise RuntimeError')}"
    assert "RuntimeError: device-side assert" in workbench.cli("events", "recorded").stdout


LOCKSTEP = """
import os, time
from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.environment import RankEnvironment

slow = os.environ["REPLICA_GROUP_ID"] == "2"
link = AgentLink(RankEnvironment.read(), target_step=10**6, on_dead=lambda _: None, wait_limits_s=(60.0, 60.0))
step = 0
while True:
    step += 1
    time.sleep(0.1 if slow else 0.02)
    with link.waiting():
        time.sleep(0.0 if slow else 0.08)
    link.committed(step, 1, 3, {"loss": 1.0})
"""


def test_the_one_that_the_others_wait_for_is_named(workbench: Workbench) -> None:
    script = workbench.folder / "lockstep.py"
    script.write_text(LOCKSTEP)
    name = workbench.up(workbench.job("lockstep", run=f"{sys.executable} {script}"))

    def is_told() -> bool:
        slower = [group["slower"] for group in workbench.status(name)["groups"]]
        assert slower[:2] == [None, None], slower
        assert (slower[2] or 0) > 2, slower
        return "replica 2 is slow: its steps take" in workbench.cli("status", name).stdout

    eventually(is_told, within_s=60)
    status = workbench.status(name)
    assert [(one["generation"], one["restarts"]) for one in status["groups"]] == [(1, 0)] * 3, (
        "nobody is ended"
    )
    assert status["state"] == "RUNNING"
