"""HIP as Debian's headers and library (5.2.3) and AMD's own bindings (7.15) have it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.abi.conftest import ORACLES, Headers, compare_enums, compare_structs, missing_from, need

ROOT = Path(__file__).parents[2]
DEVICE_ENUMS = [
    "Status", "CopyKind", "PointerAttribute", "HipAttribute", "AllocationType", "HandleType", "RangeHandleType",
    "LocationType", "AccessFlags", "Granularity",
]  # fmt: skip


@pytest.fixture(scope="session")
def hip5(debian, tmp_path_factory):
    return Headers(tmp_path_factory.mktemp("hip"), [debian / "include"], "#include <hip/hip_runtime_api.h>")


@pytest.fixture(scope="session")
def bindings():
    """AMD's Python bindings; they load no library before the first call."""
    need(ORACLES / "bindings/rocm/bindings/hip.pyi")
    sys.path.insert(0, str(ORACLES / "bindings"))
    try:
        from rocm.bindings import hip
    except ImportError as refused:
        pytest.skip(f"AMD's bindings do not load into this Python: {refused}")
    return hip


def test_numbers_are_those_of_hip_5_but_for_what_it_did_not_have(hip5, declared):
    unknown = compare_enums(hip5, declared, "hip|HIP", DEVICE_ENUMS)
    assert unknown == {
        "hipDeviceAttributeVirtualMemoryManagementSupported",
        "hipDeviceAttributeDmaBufSupported",
        "hipMemRangeHandleTypeDmaBufFd",
    }
    constants = {name: value for name, value in declared["constants"].items() if name.startswith("hip")}
    assert hip5.values(list(constants)) == constants


def test_sizes_are_those_of_hip_5_and_the_order_of_allocation_properties_is_not(hip5, declared):
    steady = [one for one in declared["device_structs"] if "hipMemAllocationProp" not in one["names"]]
    compare_structs(hip5, steady, "hip")
    (properties,) = [one for one in declared["device_structs"] if "hipMemAllocationProp" in one["names"]]
    # Equal sizes hid this: it is why nothing allocates through these properties on HIP 5.
    there = hip5.values(
        [f"{what}hipMemAllocationProp{rest}" for what, rest in (("sizeof(", ")"), ("offsetof(", ", type)"))]
        + ["offsetof(hipMemAllocationProp, location)", "offsetof(hipMemAllocationProp, requestedHandleType)"]
    )
    assert list(there.values()) == [properties["size"], 16, 4, 12]
    assert (properties["offsets"]["type"], properties["offsets"]["location"]) == (0, 8)


def test_the_drifts_that_forbid_binding_them_are_still_so(hip5, bindings):
    assert hip5.values(["sizeof(hipDeviceProp_t)", "hipMemoryTypeDevice", "hipMemoryTypeHost"]) == {
        "sizeof(hipDeviceProp_t)": 792,
        "hipMemoryTypeDevice": 1,
        "hipMemoryTypeHost": 0,
    }
    assert size_of(bindings.hipDeviceProp_t) == 1472
    assert int(bindings.hipMemoryType.hipMemoryTypeDevice) == 2


def size_of(kind) -> int:
    return kind.c_sizeof(kind.allocate())


def test_numbers_and_sizes_are_those_of_hip_7(bindings, declared):
    members = {}
    for name in dir(bindings):
        members.update(getattr(getattr(bindings, name), "__members__", {}))
    for enum in [*DEVICE_ENUMS, "MemoryType"]:
        for value, vendors in declared["enums"][enum]:
            for name in vendors:
                if name.startswith(("hip", "HIP")):
                    assert int(members[name]) == value, name
    for struct in declared["device_structs"]:
        for name in struct["names"]:
            if name.startswith("hip") and hasattr(bindings, name):
                assert size_of(getattr(bindings, name)) == struct["size"], name


def test_allocation_properties_lie_as_declared_in_hip_7(bindings, declared):
    (struct,) = [one for one in declared["device_structs"] if "hipMemAllocationProp" in one["names"]]
    properties = bindings.hipMemAllocationProp.allocate()
    properties.type = bindings.hipMemAllocationType.hipMemAllocationTypePinned
    properties.location.type = bindings.hipMemLocationType.hipMemLocationTypeHostNuma
    properties.location.id = 0x11223344
    address = properties.as_c_void_p()
    raw = ctypes.string_at(int(getattr(address, "value", address)), struct["size"])
    at = struct["offsets"]
    assert raw[at["type"] : at["type"] + 4] == (1).to_bytes(4, "little")
    assert raw[at["location"] : at["location"] + 8] == (3).to_bytes(4, "little") + (0x11223344).to_bytes(
        4, "little"
    )


def test_hip_5_has_every_entry_that_is_required(debian, declared):
    library = need(debian / "lib/x86_64-linux-gnu/libamdhip64.so.5")
    for table, lacks in (("runtime", set()), ("driver", {"hipMemGetHandleForAddressRange"})):
        assert missing_from(library, declared[table]) == (set(), lacks)


def test_hip_7_has_every_entry_at_all(declared, bindings):
    names = {
        name for table in ("runtime", "driver") for entry in declared[table] for name in entry["symbols"][:1]
    }
    text = (ORACLES / "bindings/rocm/bindings/cyhip.pxd").read_text()
    assert {name for name in names if f" {name}(" not in text} == set()


def test_a_real_hip_without_hardware_answers_that_there_is_no_device(debian):
    folder = debian / "lib/x86_64-linux-gnu"
    library = need(folder / "libamdhip64.so.5")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": f"{folder}:{debian.parent / 'lib/x86_64-linux-gnu'}",
        "SKY_MONARCH_HIP_LIB": str(library),
        "SKY_MONARCH_GPU_PLATFORM": "rocm",
    }
    program = """
import json, sys
from sky_monarch import _core
print(_core.gpu_report())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    hip = report["libraries"][0]
    assert (hip["name"], hip["origin"], hip["simulated"], hip["error"]) == ("HIP", "override", False, None), (
        hip
    )
    assert Path(hip["path"]).name.startswith("libamdhip64.so.5")
    assert hip["version"] == "50221153"
    # It has the entries of virtual memory management, and lays their structures out in another order.
    assert hip["capabilities"] == ["pointer_attributes"]
    assert (report["devices"], report["error"]) == ([], None)
