"""What the doctor makes of what tools print: forms that AMD and chrony document, whole and damaged."""

from __future__ import annotations

import json

import pytest

from sky_monarch.doctor import Severity, Situation, clock, examine, paths, smi
from sky_monarch.doctor.probe import adjtimex
from sky_monarch.doctor.smoke import smoke
from sky_monarch.doctor.tree import Tree
from tests.support.gpu_hosts import GpuHost, report

QUIET = {
    "accumulation_counter": 11240028, "prochot_accumulated": 0, "prochot_violation_status": "NOT ACTIVE",
    "ppt_violation_status": "NOT ACTIVE", "socket_thermal_violation_status": "NOT ACTIVE",
    "vr_thermal_violation_status": "NOT ACTIVE", "hbm_thermal_violation_status": "NOT ACTIVE",
    "low_utilization_violation_status": {"xcp_0": ["ACTIVE", "N/A"]},
    "hbm_thermal_violation_activity": {"value": 0, "unit": "%"},
}  # fmt: skip


def card(number, *, ecc=None, throttle=None, power=None, blocks=None):
    return {
        "gpu": number,
        "power": {"socket_power": {"value": 140, "unit": "W"}, "throttle_status": "N/A", **(power or {})},
        "ecc": {
            "total_correctable_count": 4, "total_uncorrectable_count": 0, "total_deferred_count": 0,
            "cache_correctable_count": "N/A", **(ecc or {}),
        },
        "ecc_blocks": blocks or {"UMC": {"correctable_count": 4, "uncorrectable_count": 0}},
        "throttle": {**QUIET, **(throttle or {})},
    }  # fmt: skip


def static(number, compute="SPX", memory="NPS1"):
    partition = {"compute_partition": compute, "memory_partition": memory, "partition_id": 0}
    return {"gpu": number, "bus": {"bdf": f"0000:{5 + 16 * number:02x}:00.0"}, "partition": partition}


def found(tmp_path, metrics, statics=None, *, rocm_7=True):
    host = GpuHost(tmp_path)
    wrap = (lambda cards: {"gpu_data": cards}) if rocm_7 else (lambda cards: cards)
    tools = {smi.METRIC: json.dumps(wrap(metrics)), smi.STATIC: json.dumps(wrap(statics or []))}
    findings = examine(Situation(root=host.root, report=report(host.devices), tools=tools)).findings
    return {
        one.check: one
        for one in findings
        if one.check in ("gpu.ecc", "gpu.throttled", "gpu.partition_modes", "gpu.smi")
    }


@pytest.mark.parametrize("rocm_7", [True, False])
def test_healthy_cards_are_ok_in_the_form_of_either_release(tmp_path, rocm_7):
    said = found(tmp_path, [card(n) for n in range(4)], [static(n) for n in range(4)], rocm_7=rocm_7)
    assert {name: one.severity for name, one in said.items()} == {"gpu.ecc": Severity.OK}


@pytest.mark.parametrize(
    ("changes", "check", "severity", "words"),
    [
        (
            {"ecc": {"total_uncorrectable_count": 2}, "blocks": {"UMC": {"uncorrectable_count": 2}, "GFX": {}}},
            "gpu.ecc", Severity.ERROR, "card 1 of amd-smi counts 2 uncorrectable error(s) in UMC",
        ),
        ({"ecc": {"total_deferred_count": 1}}, "gpu.ecc", Severity.WARNING, "1 deferred error(s)"),
        (
            {"throttle": {"hbm_thermal_violation_status": "ACTIVE", "ppt_violation_status": "ACTIVE"}},
            "gpu.throttled", Severity.WARNING, "slowed down by its power limit, the temperature of its memory",
        ),
        ({"power": {"throttle_status": "THROTTLED"}}, "gpu.throttled", Severity.WARNING, "one of its limits"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_card_is_said_of_it(tmp_path, changes, check, severity, words):
    said = found(tmp_path, [card(0), card(1, **changes), card(2), card(3)])
    assert said[check].severity is severity
    assert words in said[check].message
    assert said[check].fix


def test_cards_that_are_partitioned_differently_or_do_not_answer_are_found(tmp_path):
    said = found(tmp_path, [], [static(0), static(1, "CPX", "NPS4"), static(2)])
    assert said["gpu.partition_modes"].severity is Severity.ERROR
    assert "CPX/NPS4: 1" in said["gpu.partition_modes"].message
    assert said["gpu.smi"].message == "amd-smi lists 3 card(s) and the kernel 4"


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "null", '{"gpu_data": 3}', '[1, "two", null]', '[{"gpu": 0, "ecc": 5, "throttle": []}]',
     '{"gpu_data": [{"gpu": 0, "ecc": {"total_uncorrectable_count": "N/A"}}]}', "[" * 100_000],
)  # fmt: skip
def test_output_that_is_not_understood_is_no_finding_against_the_host(tmp_path, text):
    host = GpuHost(tmp_path)
    done = examine(Situation(root=host.root, report=report(host.devices), tools={smi.METRIC: text}))
    assert done.healthy
    assert all(one.check != "doctor" for one in done.findings)


TRACKING = """Reference ID    : CB00710F (ntp1.example.net)
Stratum         : 3
System time     : {off} seconds slow of NTP time
Last offset     : -0.000002747 seconds
Leap status     : {leap}
"""


@pytest.mark.parametrize(
    ("tools", "severity", "words"),
    [
        ({clock.CHRONY: TRACKING.format(off="0.000006523", leap="Normal")}, Severity.OK, "within 0.00652 ms"),
        ({clock.CHRONY: TRACKING.format(off="73.5", leap="Normal")}, Severity.WARNING, "73.5 s off"),
        ({clock.CHRONY: TRACKING.format(off="0.0", leap="Not synchronised")}, Severity.WARNING, "no time to go by"),
        ({clock.ADJTIMEX: "0 8193 2400"}, Severity.OK, "within 2.4 ms"),
        ({clock.ADJTIMEX: "5 64 16000000"}, Severity.INFO, "nothing on this host keeps the clock"),
        ({clock.ADJTIMEX: "0 1 7000000"}, Severity.WARNING, "may be 7.0 s off"),
        ({clock.ADJTIMEX: "rubbish"}, Severity.INFO, "cannot be seen here"),
        ({}, Severity.INFO, "cannot be seen here"),
    ],
)  # fmt: skip
def test_the_clock_is_judged_by_whoever_knows_it_best(tmp_path, tools, severity, words):
    (one,) = clock.check(Tree(tmp_path), tools)
    assert (one.check, one.severity) == ("host.clock", severity)
    assert words in one.message


def test_timesyncd_is_believed_where_the_kernel_cannot_tell(tmp_path):
    (tmp_path / "run/systemd/timesync").mkdir(parents=True)
    (tmp_path / "run/systemd/timesync/synchronized").touch()
    (one,) = clock.check(Tree(tmp_path), {clock.ADJTIMEX: "5 64 16000000"})
    assert one.severity is Severity.OK


def test_the_kernel_of_this_host_says_something_of_its_clock():
    state, status, wrong_us = map(int, adjtimex().split())
    assert 0 <= state <= 5
    assert status >= 0
    assert wrong_us >= 0


def test_a_host_without_devices_to_use_is_looked_at_for_what_every_job_needs_alone(tmp_path):
    host = GpuHost(tmp_path)
    host.write(f"{host.sysfs(2)}/ras/umc_err_count", "ue: 3\nce: 0")
    host.write("dev/shm/.keep", "")
    done = smoke(host.root, devices=False)
    assert done.healthy, "nobody uses its devices"
    assert {one.check.partition(".")[0] for one in done.findings} == {"host"}


def test_speeds_of_the_host_and_of_what_its_devices_exchange_are_told(tmp_path):
    host = GpuHost(tmp_path)
    pairs = [[0, 1, 40.0], [0, 2, 41.0], [1, 2, 12.0]]
    measured = {
        "exchange": {"bytes": 64 << 20, "all_reduce_gibps": 210.0, "pairs": pairs},
        "paths": {"tcp_gibps": 2.8, "cma_gibps": None, "cma_error": "Operation not permitted"},
    }
    done = examine(Situation(root=host.root, report=report(host.devices, **measured)))
    said = [(one.check, one.severity.value, one.message) for one in done.findings]
    assert (
        "gpu.exchange",
        "warning",
        "devices 1 and 2 exchange at 12.0 GiB/s where others do at 41.0",
    ) in said
    assert any(check == "host.cma" and "Operation not permitted" in words for check, _, words in said)
    failed = examine(
        Situation(root=host.root, report=report(host.devices, exchange={"failed": "device 1: gone"}))
    )
    assert not failed.healthy


def test_this_host_reads_another_process_and_talks_to_itself():
    speeds = paths.measure()
    assert speeds["tcp_gibps"] > 0
    assert speeds["cma_error"] is None or speeds["cma_gibps"] is None
