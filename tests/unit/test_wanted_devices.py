"""Whether a host has the accelerators that its replica groups need: how many, and which."""

from __future__ import annotations

from pathlib import Path

import pytest

from sky_monarch.config import check_job, load_job
from sky_monarch.config.examination import Need, examination, needs_of
from sky_monarch.doctor import Severity, Situation, Wanted, examine
from sky_monarch.doctor.tree import Tree
from sky_monarch.doctor.wanted import needs, shortfall
from sky_monarch.errors import ConfigError
from sky_monarch.launch.plan import plan_local
from sky_monarch.launch.review import require_even
from sky_monarch.sdk._here import require_accelerators
from tests.support.gpu_hosts import GpuHost, report

JOB = "name: x\nreplicas: 2\nrun: python train.py\n"


def lacking(root: Path, count: int, *kinds: str, mask: str | None = None, groups: int = 2) -> str:
    wanted = Wanted(devices=count, models=kinds, why=needs(groups))
    found = shortfall(Tree(root), wanted, {} if mask is None else {"ROCR_VISIBLE_DEVICES": mask})
    assert found is None or found.fix
    return "" if found is None else found.message


def test_none_too_few_and_another_kind_are_each_said_with_what_is_there(tmp_path: Path) -> None:
    here = GpuHost(tmp_path / "four", cards=4)
    assert lacking(here.root, 4, "MI300X") == ""
    assert lacking(here.root, 2, "MI300X") == "", "more than enough"
    assert lacking(here.root, 4, "MI250", "MI300X") == "", "any of the kinds will do"
    assert lacking(here.root, 8, "MI300X") == (
        "too few accelerators: 4 x MI300X; the job's 2 replica groups here need 8 x MI300X"
    )
    other = lacking(here.root, 4, "MI325X")
    assert other.startswith("another kind of accelerator: 4 x MI300X; ")
    none = lacking(tmp_path / "empty", 1, "MI300X", groups=1)
    assert none == "no accelerators; the job's replica group here needs 1 x MI300X"


def test_a_host_with_other_makers_devices_and_one_without_a_driver_are_told_apart(tmp_path: Path) -> None:
    nvidia = tmp_path / "nvidia"
    (nvidia / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert "no AMD accelerator (1 of NVIDIA's)" in lacking(nvidia, 1, "MI300X")
    driverless = GpuHost(tmp_path / "driverless", cards=2)
    for node in (2, 3):
        (driverless.root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties").unlink()
    assert "none of them in KFD" in lacking(driverless.root, 2, "MI300X")


def test_a_mask_of_rocr_counts_and_a_virtual_function_is_known_by_its_architecture(tmp_path: Path) -> None:
    host = GpuHost(tmp_path, cards=4)
    assert lacking(host.root, 2, "MI300X", mask="0,3") == ""
    assert lacking(host.root, 3, "MI300X", mask="0,3").startswith(
        "ROCR_VISIBLE_DEVICES leaves 2 of 4 x MI300X"
    )
    assert lacking(host.root, 1, "MI300X", mask=f"GPU-{0xABC0_0000_0000_0000 + 1:016x}") == ""
    assert lacking(host.root, 2, "MI300X", mask="1,7,2"), "ROCr stops at the first that is none"
    for node in range(2, 6):
        path = host.root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        path.write_text(path.read_text().replace(f"device_id {0x74A1}", f"device_id {0x74B5}"))
    assert lacking(host.root, 4, "MI300X") == ""
    assert lacking(host.root, 4, "MI250").startswith("another kind of accelerator: 4 x gfx942")


@pytest.mark.parametrize(("cards", "severity"), [(0, "error"), (3, "error"), (4, "ok"), (5, "error")])
def test_the_number_of_devices_is_told_in_one_row_whatever_is_expected(
    tmp_path: Path, cards: int, severity: str
) -> None:
    host = GpuHost(tmp_path, cards=cards)
    wanted = Wanted(devices=4, models=("MI300X",), exactly=True)
    found = examine(Situation(root=host.root, report=report(cards), wanted=wanted))
    (row,) = [one for one in found.findings if one.check == "gpu.count"]
    assert row.severity is Severity(severity)
    assert (f"{cards} x MI300X" if cards else "no accelerators") in row.message


def test_each_host_needs_what_its_own_groups_do() -> None:
    resources = {"any_of": [{"accelerators": "MI300X:4"}, {"accelerators": "MI325X:4"}]}
    shared = needs_of({"resources": resources}, {"h0": (0, 1), "h1": (2,), "s0": ()})
    kinds = ("MI300X", "MI325X")
    assert shared == {
        "h0": Need(devices=8, kinds=kinds, groups=2),
        "h1": Need(devices=4, kinds=kinds, groups=1),
        "s0": Need(devices=8, kinds=kinds, groups=2),
    }, "a spare may get the groups of the fullest"
    wide = needs_of({"resources": {"accelerators": "MI300X:16"}}, {"h0": (0,), "h1": (0,)})
    assert {need.devices for need in wide.values()} == {8}
    assert needs_of({"resources": {"accelerators": None}}, {"h0": (0,)}) == {}
    assert needs_of({}, {"h0": (0,)}) == {}


def test_the_look_before_the_first_step_is_told_what_the_groups_need(tmp_path: Path) -> None:
    need = Need(devices=8, kinds=("MI300X",), groups=2)
    job = {"doctor": "smoke", "resources": {"accelerators": "MI300X:4"}, "name": "x", "replicas": 2}
    look = examination(job, place="h0-a1", held=True, need=need)
    assert look is not None
    assert look["argv"][-3:] == ["--need=8", "--kinds=MI300X", "--groups=2"]
    options = {"python": "python", "version": "1", "token": "t", "base_env": {}}
    plan = plan_local(job, {}, run_id="x-1", state=tmp_path, temporary=tmp_path, **options)
    assert "--need=8" in plan.files["agent.json"]["doctor"]["argv"]


def test_a_job_whose_accelerators_are_not_here_is_refused_before_anything_is_started(
    tmp_path: Path,
) -> None:
    GpuHost(tmp_path / "local", cards=4)

    def ask(accelerators: str, env: dict[str, str] | None = None) -> None:
        text = f"{JOB}ranks_per_replica: 1\nresources: {{accelerators: {accelerators}}}\n"
        require_accelerators(load_job(text), {"SKY_MONARCH_TEST_DOCTOR_TREES": str(tmp_path), **(env or {})})

    ask("MI300X:2")
    ask("null")
    with pytest.raises(ConfigError, match="on this machine: too few accelerators") as refused:
        ask("MI300X:4")
    assert "the job's 2 replica groups here need 8 x MI300X" in str(refused.value)
    assert "doctor: off" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="another kind of accelerator"):
        ask("MI250:1")
    with pytest.raises(ConfigError, match="ROCR_VISIBLE_DEVICES leaves 1"):
        ask("MI300X:1", {"ROCR_VISIBLE_DEVICES": "2"})


def test_devices_that_are_not_one_a_process_are_told_or_refused() -> None:
    def told(accelerators: str, ranks: int, run: str = "python train.py") -> list[str]:
        text = f"name: x\nreplicas: 2\nrun: {run}\nranks_per_replica: {ranks}\n"
        found = check_job(f"{text}resources: {{accelerators: {accelerators}}}\n")
        assert found.job is not None
        return [str(problem) for problem in found.problems]

    (one,) = told("MI300X:8", 1)
    assert "8 x MI300X for 1 process of a group (ranks_per_replica: 1): each sees 8 devices" in one
    assert "for one process a device: ranks_per_replica: 8" in one
    assert "2 processes of a group (ranks_per_replica: 2): each sees 4 devices" in told("MI300X:8", 2)[0]
    assert told("MI300X:8", 8) == []
    assert told("MI300X:8", 1, "torchrun --nproc_per_node 8 train.py") == [], "it starts them itself"
    require_even(load_job(f"{JOB}ranks_per_replica: 4\nresources: {{accelerators: MI300X:8}}\n"))
    with pytest.raises(ConfigError, match="MI300X:8 cannot be shared out evenly among the 3 ranks"):
        require_even(load_job(f"{JOB}ranks_per_replica: 3\nresources: {{accelerators: MI300X:8}}\n"))
