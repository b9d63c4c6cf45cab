"""The doctor command, on this host as it is and with a software double of HIP."""

import json
import subprocess
import sys
import time

import pytest

from sky_monarch.doctor.probe import probe
from tests.support.gpu_hosts import GpuHost
from tests.support.hip_double import with_ccl_double, with_double


def doctor(*words, env=None):
    return subprocess.run(
        [sys.executable, "-m", "sky_monarch", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
    )


def findings(text):
    found = json.loads(text)
    return found, {(one["check"], one["severity"]): one["message"] for one in found["findings"]}


def test_a_host_without_accelerators_is_no_error_and_a_pipe_gets_no_control_sequences():
    done = doctor()
    if "no accelerators" not in done.stdout:
        pytest.skip("this host has accelerators")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 error(s), ")


def test_the_double_is_tried_and_measured_and_is_always_called_simulated():
    done = doctor("--json", "--bench", env=with_double())
    found, by_check = findings(done.stdout)
    assert found["simulated"] is True
    assert by_check["gpu.simulated", "warning"].startswith("SIMULATED")
    assert by_check["gpu.smoke", "ok"] == "2 device(s) gave back what they were sent"
    assert "GiB/s to it" in by_check["gpu.copies", "info"]
    # There is no RCCL here, and a platform of AMD's that was forced needs one.
    assert done.returncode == (0 if found["healthy"] else 1)
    assert doctor(env=with_double()).stdout.splitlines()[-1].startswith("SIMULATED: ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("death", "trying the libraries and devices ended by SIGKILL"),
        ("corrupt", "gives back other bytes than it was sent"),
        ("async:700", "hipStreamQuery returned 700"),
    ],
)
def test_a_device_that_fails_is_named_and_the_doctor_lives(fault, said):
    done = doctor("--json", env=with_double(SKY_DOUBLE_FAULT=fault))
    _, by_check = findings(done.stdout)
    assert done.returncode == 1
    assert said in by_check["gpu.smoke", "error"]


def test_a_device_that_hangs_costs_the_limit_and_no_more():
    begun = time.monotonic()
    report = probe(limit_s=3, env=with_double(SKY_DOUBLE_FAULT="hang"))
    assert report == {"failed": "was not done after 3 s"}
    assert time.monotonic() - begun < 40


def test_devices_that_should_be_there_are_asked_for_in_the_jobs_spelling():
    done = doctor("--json", "--expect", "mi300x:8")
    _, by_check = findings(done.stdout)
    if "no accelerators" not in by_check["gpu.count", "error"]:
        pytest.skip("this host has accelerators")
    assert done.returncode == 1
    assert by_check["gpu.count", "error"] == "no accelerators; expected: 8 x MI300X"
    assert [check for check, _ in by_check].count("gpu.count") == 1
    unknown = doctor("--expect", "foo")
    assert unknown.returncode == 2
    assert "MI210" in unknown.stderr
    assert "MI355X" in unknown.stderr
    assert "hint: name one of them and how many: --expect MI300X:8" in unknown.stderr
    assert "did you mean --expect MI300X:8?" in doctor("--expect", "MI30X:8").stderr


@pytest.mark.parametrize("ue", [0, 3])
def test_a_host_that_lacks_iommu_passthrough_and_mixes_nics_is_told_so_with_fixes(tmp_path, ue):
    nics = {"mlx5_0": 0x15B3, "mlx5_1": 0x15B3, "bnxt_re0": 0x14E4, "bnxt_re1": 0x14E4}
    host = GpuHost(tmp_path / "trees/this", cards=2, nics=nics)
    host.write("dev/shm/.keep", "")
    host.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz ro quiet")
    host.write(f"{host.sysfs(1)}/ras/umc_err_count", f"ue: {ue}\nce: 0")
    env = with_ccl_double(SKY_MONARCH_TEST_DOCTOR_TREES=str(tmp_path / "trees"), SKY_DOUBLE_DEVICES="2")
    done = doctor("--json", "--expect", "MI300X:2", env=env)
    told, _ = findings(done.stdout)
    by_check = {one["check"]: one for one in told["findings"]}
    assert {"kernel.iommu", "network.mixed"} <= by_check.keys(), by_check.keys()
    assert by_check["kernel.iommu"]["severity"] == by_check["network.mixed"]["severity"] == "warning"
    assert all(one["fix"] for one in told["findings"] if one["severity"] in ("error", "warning"))
    errors = {one["check"] for one in told["findings"] if one["severity"] == "error"} - {
        "network.locked_memory",  # this machine's own limit
        "network.verbs",
        "torch.build",
    }
    assert errors == ({"gpu.memory_errors"} if ue else set())
    assert done.returncode == (0 if told["healthy"] else 1), "errors alone make it so"
    assert not (ue and told["healthy"])
    assert [one["model"] for one in told["accelerators"]] == ["MI300X"] * 2


def test_what_devices_exchange_is_measured_by_a_process_each():
    done = doctor("--json", "--bench", env=with_ccl_double())
    _, by_check = findings(done.stdout)
    assert "between two devices" in by_check["gpu.exchange", "info"], done.stdout
    assert ("host.tcp", "info") in by_check


def test_devices_that_do_not_exchange_are_an_error_within_the_limit():
    done = doctor("--json", "--bench", env=with_ccl_double(SKY_DOUBLE_CCL_FAULT="async:3"))
    _, by_check = findings(done.stdout)
    assert "the communicator is lost" in by_check["gpu.exchange", "error"]
    assert done.returncode == 1
