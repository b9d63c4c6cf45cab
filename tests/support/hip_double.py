"""The software double of HIP, built."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def hip_double() -> Path:
    """Path of the double's library."""
    if built := os.environ.get("SKY_MONARCH_TEST_HIP_DOUBLE"):
        return Path(built)
    command = ["cargo", "build", "--quiet", "--package", "sky-monarch-double-hip"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return ROOT / "target/debug/libamdhip64.so"


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
