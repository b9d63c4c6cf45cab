"""A device of torch's whose memory the host cannot follow, built here: ``far_device.cpp``. SIMULATED."""

from __future__ import annotations

import subprocess
import types
from pathlib import Path

settled: list[object] = []
"""Devices that were waited for, in order."""


def build(folder: Path) -> Path:
    """Compile it against this torch; takes a minute."""
    import torch

    root = Path(torch.__file__).parent
    library = folder / "far_device.so"
    includes = [root / "include", root / "include/torch/csrc/api/include"]
    abi = int(torch.compiled_with_cxx11_abi())
    command = [
        *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{one}" for one in includes),
        *(str(Path(__file__).with_suffix(".cpp")), "-o", str(library)),
        *(f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
    ]
    subprocess.run(command, check=True, timeout=600)
    return library


def load(library: Path) -> None:
    """Have it in this process as device ``far``."""
    import torch

    module = types.ModuleType("torch.far")
    module.synchronize = settled.append  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend("far")
    torch._register_device_module("far", module)
    torch.ops.load_library(library)
