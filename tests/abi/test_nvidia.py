"""CUDA and NCCL as the headers and libraries have them that come with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.abi.conftest import Headers, compare_enums, compare_structs, exported, missing_from, need
from tests.abi.test_hip import DEVICE_ENUMS

ROOT = Path(__file__).parents[2]


def newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    return need(found[-1] if found else folder / pattern)


#: The wheels leave out what belongs to the compiler; these are the words of it that the headers read below use.
_COMPILERS = {
    "crt/host_defines.h": (
        "#define __device_builtin__\n#define __align__(n) __attribute__((aligned(n)))\n#define CUDARTAPI\n"
        "#define __builtin_align__(n) __align__(n)\n#define __cudart_builtin__\n#define __host__\n#define __device__\n"
    ),
    "cuda_runtime.h": "#include <stddef.h>\n#include <stdint.h>\ntypedef struct CUstream_st *cudaStream_t;\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
}


def headers(folder: Path, includes: list[Path], prelude: str) -> Headers:
    for name, text in _COMPILERS.items():
        file = folder / "compiler" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Headers(folder, [folder / "compiler", *includes], prelude)


@pytest.fixture(scope="session")
def cuda(nvidia, tmp_path_factory):
    include = newest(nvidia, "cu*/include/cuda.h").parent
    prelude = "#include <cuda.h>\n#include <driver_types.h>"
    return headers(tmp_path_factory.mktemp("cuda"), [include], prelude)


@pytest.fixture(scope="session")
def nccl(nvidia, tmp_path_factory):
    include = newest(nvidia, "nccl/include/nccl.h").parent
    return headers(tmp_path_factory.mktemp("nccl"), [include], "#include <nccl.h>")


def test_numbers_and_layouts_are_cudas(cuda, declared):
    enums = [name for name in DEVICE_ENUMS if name != "HipAttribute"]
    assert compare_enums(cuda, declared, "cuda|CU_", [*enums, "CudaAttribute", "MemoryType"]) == set()
    compare_structs(cuda, declared["device_structs"], "CU")
    constants = {name: value for name, value in declared["constants"].items() if name.startswith("cuda")}
    assert cuda.values(list(constants)) == constants


def test_cudas_driver_numbers_its_errors_as_its_runtime_does(cuda, declared):
    twins = {
        "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_NOT_INITIALIZED": 3,
        "CUDA_ERROR_NO_DEVICE": 100, "CUDA_ERROR_INVALID_DEVICE": 101, "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
        "CUDA_ERROR_NOT_FOUND": 500, "CUDA_ERROR_NOT_READY": 600, "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_CONTEXT_IS_DESTROYED": 709, "CUDA_ERROR_LAUNCH_FAILED": 719, "CUDA_ERROR_NOT_SUPPORTED": 801,
        "CUDA_ERROR_UNKNOWN": 999,
    }  # fmt: skip
    assert cuda.values(list(twins)) == twins
    assert set(twins.values()) <= {value for value, _ in declared["enums"]["Status"]}


def test_the_cuda_runtime_has_every_entry_and_its_header_names_the_drivers(nvidia, cuda, declared):
    assert missing_from(newest(nvidia, "cu*/lib/libcudart.so.*"), declared["runtime"], 1) == (set(), set())
    # `cuda.h` renames some with a version: the table has the name that the library exports.
    unknown = {entry["symbols"][1] for entry in declared["driver"] if not cuda.has(entry["symbols"][1])}
    assert unknown == set()


def test_nccls_numbers_are_declared_but_for_what_is_newer(nccl, declared):
    unknown = compare_enums(nccl, declared, "nccl", ["CclResult", "DataType", "ReduceOp"])
    # torch's NCCL may be older than 2.30, which has it: 8 was the number of results before.
    assert unknown <= {"ncclTimeout"}


def test_nccls_configuration_begins_as_declared_and_is_longer(nccl, declared):
    unique, config = declared["ccl_structs"]
    compare_structs(nccl, [unique], "nccl")
    wanted = {f"offsetof(ncclConfig_t, {field})": at for field, at in config["offsets"].items()}
    there = nccl.values([*wanted, "sizeof(ncclConfig_t)"])
    assert there.pop("sizeof(ncclConfig_t)") > config["size"]
    assert there == wanted


def test_a_real_nccl_has_every_entry_that_is_required(nvidia, declared):
    library = newest(nvidia, "nccl/lib/libnccl.so.2")
    required, optional = missing_from(library, declared["ccl"])
    assert required == set()
    assert {"ncclCommSplit", "ncclCommShrink", "ncclMemAlloc"} <= exported(library)
    assert optional <= {
        "ncclCommRevoke",
        "ncclCommGrow",
        "ncclCommGetUniqueId",
        "ncclCommSuspend",
        "ncclCommResume",
    }


def test_real_cuda_libraries_without_a_driver_say_so(nvidia):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SKY_MONARCH_CUDART_LIB": str(newest(nvidia, "cu*/lib/libcudart.so.*")),
        "SKY_MONARCH_NCCL_LIB": str(newest(nvidia, "nccl/lib/libnccl.so.2")),
        "SKY_MONARCH_GPU_PLATFORM": "cuda",
    }
    program = "from sky_monarch import _core; print(_core.gpu_report())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    cuda, nccl = report["libraries"][:2]
    assert cuda["error"] is None
    assert int(cuda["version"]) >= 12000
    assert (nccl["error"], nccl["version"][:2]) == (None, "2.")
    assert "split" in nccl["capabilities"]
    if not Path("/dev/nvidiactl").exists():
        assert "cudaGetDeviceCount returned" in report["error"]
        assert report["devices"] == []
