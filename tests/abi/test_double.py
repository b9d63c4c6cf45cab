"""AMD's own bindings drive our software double of HIP: it is what they take for HIP."""

from __future__ import annotations

import subprocess
import sys

from tests.abi.conftest import ORACLES, missing_from, need
from tests.support.hip_double import ccl_double, hip_double, with_double

PROGRAM = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from rocm.bindings import hip

def checked(result):
    status, *values = result if isinstance(result, tuple) else (result,)
    assert status == hip.hipError_t.hipSuccess, status
    return values[0] if len(values) == 1 else values

assert checked(hip.hipGetDeviceCount()) == 2
assert checked(hip.hipRuntimeGetVersion()) == 70125424
sent, back = bytearray(range(256)) * 16, bytearray(4096)
there = checked(hip.hipMalloc(4096))
to_device, to_host = hip.hipMemcpyKind.hipMemcpyHostToDevice, hip.hipMemcpyKind.hipMemcpyDeviceToHost
stream = checked(hip.hipStreamCreateWithFlags(1))
checked(hip.hipMemcpyAsync(there, sent, 4096, to_device, stream))
checked(hip.hipStreamSynchronize(stream))
checked(hip.hipMemcpy(back, there, 4096, to_host))
assert back == sent
checked(hip.hipFree(there))
checked(hip.hipStreamDestroy(stream))
(refused,) = hip.hipSetDevice(7) if isinstance(hip.hipSetDevice(7), tuple) else (hip.hipSetDevice(7),)
assert refused == hip.hipError_t.hipErrorInvalidDevice, refused
last = hip.hipGetLastError()
assert (last[0] if isinstance(last, tuple) else last) == hip.hipError_t.hipErrorInvalidDevice
last = hip.hipGetLastError()
assert (last[0] if isinstance(last, tuple) else last) == hip.hipError_t.hipSuccess
print("driven")
"""


def test_amds_bindings_copy_through_the_double():
    need(ORACLES / "bindings/rocm/bindings/hip.pyi")
    env = with_double(LD_LIBRARY_PATH=str(hip_double().parent))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ORACLES / "bindings")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert "driven" in done.stdout, done.stderr[-3000:]
    assert "SIMULATED" in done.stderr


COLLECTIVE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from rocm.bindings import hip, rccl

def checked(result, *wanted):
    status, *values = result if isinstance(result, tuple) else (result,)
    assert status in (wanted or (hip.hipError_t.hipSuccess, rccl.ncclResult_t.ncclSuccess)), status
    return values[0] if len(values) == 1 else values

assert checked(hip.hipGetDeviceCount()) == 2
assert checked(rccl.ncclGetVersion()) == 22707
id = checked(rccl.ncclGetUniqueId())
# By value, all of its 128 bytes; the configuration is AMD's own, of 96 bytes.
config = rccl.ncclConfig_v22800.allocate()
config.size, config.magic, config.version, config.blocking = 96, 0xCAFEBEEF, 23004, 0
there = checked(hip.hipMalloc(16))
stream = checked(hip.hipStreamCreateWithFlags(1))
comm = checked(rccl.ncclCommInitRankConfig(1, id, 0, config), rccl.ncclResult_t.ncclInProgress)
sent, back = bytes.fromhex("0000803f") * 4, bytearray(16)
checked(hip.hipMemcpy(there, sent, 16, hip.hipMemcpyKind.hipMemcpyHostToDevice))
f32, total = rccl.ncclDataType_t.ncclFloat32, rccl.ncclRedOp_t.ncclSum
success, early = rccl.ncclResult_t.ncclSuccess, rccl.ncclResult_t.ncclInvalidUsage
until = time.monotonic() + 20
while True:
    result = rccl.ncclAllReduce(there, there, 4, f32, total, comm, stream)
    status = result[0] if isinstance(result, tuple) else result
    if status == success:
        break
    assert status == early and time.monotonic() < until, status
    time.sleep(0.01)
checked(hip.hipStreamSynchronize(stream))
checked(hip.hipMemcpy(back, there, 16, hip.hipMemcpyKind.hipMemcpyDeviceToHost))
assert bytes(back) == sent
checked(rccl.ncclCommAbort(comm))
print("reduced")
"""


def test_amds_bindings_reduce_through_the_double_of_rccl():
    need(ORACLES / "bindings/rocm/bindings/rccl.pyi")
    folders = f"{hip_double().parent}:{ccl_double().parent}"
    env = with_double(LD_LIBRARY_PATH=folders)
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIVE, str(ORACLES / "bindings")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert "reduced" in done.stdout, done.stderr[-3000:]
    assert "SIMULATED: a software double of RCCL" in done.stderr


def test_the_double_of_rccl_has_every_entry_that_is_required(declared):
    required, _ = missing_from(ccl_double(), declared["ccl"])
    assert required == set()


def test_the_double_has_every_entry_of_either_vendor_but_what_only_processes_share(declared):
    for column in (0, 1):
        for table in ("runtime", "driver"):
            required, optional = missing_from(hip_double(), declared[table], column)
            assert required == set()
            assert {name for name in optional if "Ipc" not in name and "Ctx" not in name} == set()
