"""Hosts are looked at before their first step: an unfit one is fenced by name, and had anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.gpu_hosts import GpuHost
from tests.support.hip_double import with_double
from tests.support.runs import FREE_RANK, ROOT, Workbench
from tests.support.waiting import eventually


def examined(bench: Workbench, name: str) -> list[dict]:
    return [event for event in bench.events(name) if event["event"] == "examined"]


def test_an_unfit_host_is_fenced_by_name_before_its_first_step_and_had_anew(
    workbench: Workbench, tmp_path: Path
) -> None:
    (tmp_path / "trees/unfit-h1-a1").mkdir(parents=True)  # a host without /dev/shm
    workbench.env["SKY_MONARCH_TEST_DOCTOR_TREES"] = str(tmp_path / "trees")
    job = workbench.job("unfit", run=f"{FREE_RANK} --steps 60", replicas=2, min_replicas=2)
    name = workbench.up(job, "--hosts", "2")
    ended = workbench.wait_for_end(name)
    assert ended["state"] == "SUCCEEDED", ended["reason"]
    attempts = {host["host"]: host["attempt"] for host in ended["hosts"]}
    assert attempts == {"unfit-h0": 1, "unfit-h1": 2}, "it is had anew, once, and alone"

    events = workbench.events(name)
    first = next(one for one in examined(workbench, name) if one["host"] == "unfit-h1")
    (found,) = (one for one in first["findings"] if one["severity"] == "error")
    assert found["check"] == "host.shm"
    assert "mount a tmpfs" in found["fix"]
    before = [event["event"] for event in events[: events.index(first)] if event.get("replica") == 1]
    assert "generation_started" not in before, "nothing ran on it"
    assert sum(event["event"] == "generation_started" for event in events) == 2
    reasons = [event["reason"] for event in events if event["event"] == "run_state" and event["reason"]]
    why = "host unfit-h1: unfit, host.shm: there is no /dev/shm"
    assert any(why in reason and "fix: mount a tmpfs" in reason for reason in reasons), reasons
    assert "host unfit-h1 was examined in" in workbench.cli("events", name).stdout


def test_a_run_on_this_machine_tells_what_was_found_and_waits_for_none_of_it(workbench: Workbench) -> None:
    job = workbench.job("fit", run=f"{FREE_RANK} --steps 40 {workbench.ease(10)}", replicas=1)
    name = workbench.up(job)
    eventually(lambda: examined(workbench, name), within_s=30, what="it was looked at, while it trains")
    workbench.gate.touch()
    ended = workbench.wait_for_end(name)
    assert ended["state"] == "SUCCEEDED", ended["reason"]
    (one,) = examined(workbench, name)
    assert one["host"] == "local"
    assert one["took_s"] < 30
    assert {found["check"] for found in one["findings"]} >= {"host.shm", "host.name", "host.clock"}
    connected = next(event for event in workbench.events(name) if event["event"] == "agent_connected")
    assert "examining" not in connected


def test_a_job_that_wants_no_doctor_has_none(workbench: Workbench) -> None:
    name = workbench.up(workbench.job("bare", run=f"{FREE_RANK} --steps 20", replicas=1, doctor="off"))
    assert workbench.wait_for_end(name)["state"] == "SUCCEEDED"
    assert examined(workbench, name) == []


def test_devices_are_looked_at_where_the_job_has_any(tmp_path: Path) -> None:
    host = GpuHost(tmp_path / "trees/h-a1", cards=2)
    host.write("dev/shm/.keep", "")
    host.write(f"{host.sysfs(1)}/ras/umc_err_count", "ue: 3\nce: 0")
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "sky_monarch.doctor.smoke",
        "--host=h-a1",
        "--devices",
        "--out",
        str(out),
    ]
    env = with_double(SKY_MONARCH_TEST_DOCTOR_TREES=str(tmp_path / "trees"), SKY_DOUBLE_DEVICES="2")
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=60, capture_output=True)
    found = json.loads(out.read_text())["findings"]
    errors = {one["check"]: one["message"] for one in found if one["severity"] == "error"}
    assert "counts 3 uncorrectable error(s)" in errors["gpu.memory_errors"]
    assert not [check for check in errors if check.startswith(("library.", "torch."))], (
        "the job may bring them"
    )
    assert any(one["check"] == "gpu.smoke" and one["severity"] == "ok" for one in found), (
        "the devices were tried"
    )


def test_accelerators_that_a_host_lacks_are_found_by_the_look_and_refused_at_once_on_this_machine(
    workbench: Workbench, tmp_path: Path
) -> None:
    host = GpuHost(tmp_path / "trees/h-a1", cards=2)
    host.write("dev/shm/.keep", "")
    out = tmp_path / "found.json"
    look = ["--host=h-a1", "--devices", "--need=4", "--kinds=MI300X", "--groups=2", "--out", str(out)]
    env = with_double(SKY_MONARCH_TEST_DOCTOR_TREES=str(tmp_path / "trees"), SKY_DOUBLE_DEVICES="2")
    command = [sys.executable, "-m", "sky_monarch.doctor.smoke", *look]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=60, capture_output=True)
    rows = [one for one in json.loads(out.read_text())["findings"] if one["check"] == "gpu.count"]
    assert [row["severity"] for row in rows] == ["error"], "which fences a host by name"
    assert (
        "too few accelerators: 2 x MI300X; the job's 2 replica groups here need 4 x MI300X"
        in rows[0]["message"]
    )

    (tmp_path / "trees/local").mkdir()  # a machine without any
    workbench.env["SKY_MONARCH_TEST_DOCTOR_TREES"] = str(tmp_path / "trees")
    resources = {"accelerators": "MI300X:1"}
    job = workbench.job("none", run=f"{FREE_RANK} --steps 20", replicas=1, resources=resources)
    done = workbench.cli("up", str(job))
    assert done.returncode == 2
    assert "error: resources.accelerators: on this machine: no accelerators" in done.stderr
    assert "`doctor: off`" in done.stderr
    assert not list(workbench.home.glob("runs/*")), "nothing was started"
