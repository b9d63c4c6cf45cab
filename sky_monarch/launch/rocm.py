"""What hosts with AMD GPUs need, said once a platform: image, environment, and what does not go with ROCm."""

from __future__ import annotations

import re

from sky_monarch.gpus import Gpu

__all__ = ["DEFAULT_IMAGE", "cuda_in", "environment", "image_is_cuda", "image_rocm", "too_old_for"]

DEFAULT_IMAGE = "docker:rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0"
"""AMD's own, of the newest ROCm whose RCCL does not hang where a rank is missing while a communicator is made: that of
7.14 and 10.0 (RCCL 2.30.4) does (rocm-systems #10796)."""

# What CUDA's images call themselves. Docker Hub's pytorch/pytorch are CUDA builds without saying so.
_CUDA_IMAGE = re.compile(
    r"(?:^|[/:._-])(?:cuda|cu1\d{1,2}|cudnn\d*|nvidia|nvcr\.io|tensorrt)(?=[/:._-]|\d|$)", re.IGNORECASE
)
_CUDA_BY_HABIT = re.compile(r"^(?:docker\.io/)?pytorch/pytorch(?::|@|$)", re.IGNORECASE)
_IMAGE_ROCM = re.compile(r"rocm[-_]?v?(\d+)\.(\d+)", re.IGNORECASE)

# What installs CUDA builds, in the text of a script.
_CUDA_INSTALLED = re.compile(
    r"download\.pytorch\.org/whl/(?:nightly/|test/)?cu\d+"
    r"|\btorch[a-z]*\s*==\s*[\w.]+\+cu\d+"
    r"|\bnvidia-[a-z0-9-]+-cu\d+\b"
    r"|\bpytorch-cuda\b"
    r"|--torch-backend(?:=|\s+)[\"']?cu\d+"
    r"|\bUV_TORCH_BACKEND=[\"']?cu\d+"
    r"|\bcupy-cuda\d+\w*",
    re.IGNORECASE,
)

# Sources: AMD's Primus image sets the first; rccl #1454 asks for the second; RCCL stays silent without the third.
_ALL = {"HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_DMABUF_ENABLE": "1", "NCCL_DEBUG": "WARN"}


def environment() -> dict[str, str]:
    """Variables for RCCL and ROCr, sorted by name.

    No mask is among them: the agent gives each rank its devices, and Slurm its job's. Neither is what depends on a
    network (``NCCL_IB_HCA``, ``NCCL_IB_GID_INDEX``): a wrong one is silent and slow, or hangs.
    """
    return dict(sorted(_ALL.items()))


def image_is_cuda(image: str) -> bool:
    """Whether a container image is known by its name to be built for CUDA."""
    name = image.removeprefix("docker:")
    return bool(_CUDA_IMAGE.search(name) or _CUDA_BY_HABIT.match(name))


def image_rocm(image: str) -> tuple[int, int] | None:
    """The ROCm release that an image's name states; None where it states none."""
    match = _IMAGE_ROCM.search(image)
    return (int(match[1]), int(match[2])) if match else None


def too_old_for(gpu: Gpu, image: str) -> str | None:
    """The ROCm release that this model needs, where the image is known to have an older one."""
    stated = image_rocm(image)
    if gpu.rocm is None or stated is None:
        return None
    major, _, minor = gpu.rocm.partition(".")
    return gpu.rocm if stated < (int(major), int(minor)) else None


def cuda_in(script: str) -> str | None:
    """The part of a script that installs a build for CUDA; None where there is none."""
    match = _CUDA_INSTALLED.search(script)
    return match[0] if match else None
