"""The software doubles of HIP and RCCL, built."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _built(package: str, file: str, variable: str) -> Path:
    if built := os.environ.get(variable):
        return Path(built)
    command = ["cargo", "build", "--quiet", "--package", package]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return ROOT / "target/debug" / file


@functools.cache
def hip_double() -> Path:
    """The library of the double of HIP."""
    return _built("sky-monarch-double-hip", "libamdhip64.so", "SKY_MONARCH_TEST_HIP_DOUBLE")


@functools.cache
def ccl_double() -> Path:
    """The library of the double of RCCL."""
    return _built("sky-monarch-double-ccl", "librccl.so", "SKY_MONARCH_TEST_CCL_DOUBLE")


def with_double(**settings: str) -> dict[str, str]:
    """An environment in which HIP is the double."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SKY_MONARCH_TEST_SIMULATED_GPU": "1",
        "SKY_MONARCH_GPU_PLATFORM": "rocm",
        "SKY_MONARCH_HIP_LIB": str(hip_double()),
        **settings,
    }


def with_ccl_double(**settings: str) -> dict[str, str]:
    """An environment in which HIP and RCCL, and CUDA and NCCL, are the doubles."""
    hip, ccl = str(hip_double()), str(ccl_double())
    names = dict.fromkeys(("SKY_MONARCH_CUDART_LIB", "SKY_MONARCH_CUDA_LIB"), hip)
    names |= dict.fromkeys(("SKY_MONARCH_RCCL_LIB", "SKY_MONARCH_NCCL_LIB"), ccl)
    return with_double(**{**names, **settings})
