"""Jobs that no host could run, or that ROCm could not: refused in the plan, with what would help."""

from __future__ import annotations

import pytest

from sky_monarch.config import load_job
from sky_monarch.errors import ConfigError
from sky_monarch.launch.cluster_plan import plan_clusters

BASE = "name: demo\nreplicas: 4\nranks_per_replica: 2\nrun: python train.py\n"
WHEELS = "https://download.pytorch.org/whl"


def plan(text: str):
    return plan_clusters(load_job(f"{BASE}{text}\n"))


@pytest.mark.parametrize(
    ("text", "words", "fix"),
    [
        ("infra: aws\nresources: {accelerators: MI300X:2}", "nothing is known of this place", "runpod"),
        (
            "infra: vultr\nresources: {accelerators: MI300X:2}",
            "Vultr is reached by k8s or ssh",
            "k8s/CONTEXT",
        ),
        ("infra: do\nresources: {accelerators: MI300X:2, use_spot: true}", "no spot", "leave use_spot out"),
        (
            "infra: oci\nresources: {accelerators: MI300X:2, use_spot: true}",
            "not sold as spot",
            "leave use_spot out",
        ),
        (
            "infra: slurm\nresources: {accelerators: MI300X:2, use_spot: true}",
            "no spot",
            "leave use_spot out",
        ),
        ("infra: oci\nresources: {accelerators: MI300X:2, gpus_per_host: 4}", "has 4 MI300X", "to 8"),
        (
            "infra: runpod\nresources: {accelerators: MI300X:2, image: 'docker:nvcr.io/nvidia/pytorch:25.01-py3'}",
            "built for CUDA",
            "rocm/pytorch",
        ),
        (
            "infra: runpod\nresources: {accelerators: MI300X:2, image: pytorch/pytorch:latest}",
            "CUDA",
            "rocm/",
        ),
        (
            "infra: oci\nresources: {accelerators: MI300X:2, image: rocm/pytorch:latest}",
            "no container",
            "setup",
        ),
        (
            "infra: k8s\nresources: {accelerators: MI355X:2, image: 'rocm/pytorch:rocm6.4_py3.12'}",
            "does not know gfx950",
            "leave image out",
        ),
        (
            f"infra: k8s\nsetup: pip install torch --index-url {WHEELS}/cu128\nresources: {{accelerators: MI300X:2}}",
            "setup installs a build for CUDA (download.pytorch.org/whl/cu128)",
            "whl/rocm",
        ),
        (
            "infra: k8s\nsetup: pip install torch==2.9.0+cu126\nresources: {accelerators: MI300X:2}",
            "torch==2.9.0+cu126",
            "rocm",
        ),
        (
            "infra: k8s\nsetup: uv pip install torch --torch-backend=cu128\nresources: {accelerators: MI300X:2}",
            "setup installs a build for CUDA (--torch-backend=cu128)",
            "rocm",
        ),
        (
            "infra: k8s\nsetup: UV_TORCH_BACKEND=cu126 uv sync\nresources: {accelerators: MI300X:2}",
            "UV_TORCH_BACKEND=cu126",
            "rocm",
        ),
        (
            "infra: runpdo\nresources: {accelerators: MI300X:2}",
            "nothing is known of this place",
            "did you mean runpod?",
        ),
        (
            "infra: runpod/mars\nresources: {accelerators: MI300X:2}",
            "no region mars is known there",
            "known are AU, CA, CZ",
        ),
        (
            "infra: runpod/us\nresources: {accelerators: MI300X:2}",
            "no region us is known there",
            "did you mean runpod/US?",
        ),
        (
            "infra: runpod/US-KS-2\nresources: {accelerators: MI300X:2}",
            "US-KS-2 is a zone, not a region",
            "write runpod/US/US-KS-2",
        ),
        (
            "infra: runpod/US/US-KS-9\nresources: {accelerators: MI300X:2}",
            "no zone US-KS-9 is known there",
            "did you mean runpod/US/US-KS-",
        ),
        (
            "infra: runpod\nresources: {accelerators: MI300X:4}",
            "4 groups need 2 hosts of RunPod",
            "ask for 2 GPUs a group or 2 groups, which share one host of 8 (now 16 GPUs)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_fix(text, words, fix):
    with pytest.raises(ConfigError) as caught:
        plan(text)
    error = caught.value

    assert words in str(error)
    assert fix in error.hint


@pytest.mark.parametrize("infra", ["do", "slurm", "k8s"])
def test_a_spare_host_beside_groups_over_several_hosts_is_refused_before_it_has_a_price(infra):
    text = f"infra: {infra}\nresources: {{accelerators: MI300X:16, gpus_per_host: 8}}\n"
    assert len(plan(text).choices[0].hosts) == 8

    with pytest.raises(
        ConfigError, match="takes 2 hosts of 8, and a spare host takes whole groups only"
    ) as caught:
        plan(f"{text}recovery: {{spare: 1}}")
    assert "leave recovery.spare out, or ask for 8 GPUs a group or fewer" in caught.value.hint


def test_a_candidate_that_has_no_room_for_a_spare_is_left_out_beside_one_that_has():
    text = "recovery: {spare: 1}\nresources: {gpus_per_host: 4, any_of: [%s]}"
    found = plan(text % "{infra: slurm, accelerators: MI300X:8}, {infra: k8s, accelerators: MI300X:4}")

    assert [choice.infra for choice in found.choices] == ["k8s"]
    assert "whole groups only" in str(found.refused[0])


@pytest.mark.parametrize("wanted", ["H100:8", "MI300X:0.5", "{MI300X: 0.5}", "MI999:8", "NVIDIA A100:1"])
def test_a_gpu_of_another_make_an_unknown_one_and_a_part_of_one_are_refused_with_line_and_fix(wanted):
    with pytest.raises(ConfigError) as caught:
        plan(f"infra: runpod\nresources: {{accelerators: {wanted}}}")

    (problem,) = caught.value.problems
    assert problem.line == 6
    assert problem.fix or problem.suggestion or "no AMD Instinct GPU of" in problem.message


@pytest.mark.parametrize(
    "image", ["rocm/pytorch:latest", "ghcr.io/me/train:v1", "docker:rocm/vllm-dev:nightly", "me/nvidiafree:1"]
)
def test_an_image_that_is_not_known_to_be_for_cuda_is_taken(image):
    (choice,) = plan(f"infra: runpod\nresources: {{accelerators: MI300X:2, image: '{image}'}}").choices

    assert choice.image == f"docker:{image.removeprefix('docker:')}"


def test_without_amd_gpus_a_cuda_image_is_nobodys_business():
    assert plan("infra: k8s\nresources: {image: 'nvidia/cuda:12.8.0-base', cpus: 2}").choices[0].image


@pytest.mark.parametrize(
    "script", ["pip install torch", "pip install torch --index-url X/whl/rocm7.2", "cu128"]
)
def test_a_script_that_may_be_fine_is_taken(script):
    assert plan(f"infra: k8s\nsetup: {script}\nresources: {{accelerators: MI300X:2}}").choices


def test_groups_far_apart_must_be_said_to_train_semi_synchronously():
    with pytest.raises(ConfigError, match="must share a network") as caught:
        plan("infra: oci\nplacement: any\nresources: {accelerators: MI300X:2}")

    assert "sync: diloco(20)" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("placement: Any", "any"),
        ("placement: samezone", "same-zone"),
        ("head: local", "here"),
        ("head: clusters", "cluster"),
        ("sync: diloco", "diloco(20)"),
        ("sync: every-step", "every_step"),
        ("resources: {gpus_per_host: 9}", None),
        ("resources: {image: 'a b'}", None),
        ("resources: {image: 'https://x/y'}", None),
    ],
)
def test_a_word_that_a_field_does_not_take_is_answered_with_the_nearest(line, suggestion):
    with pytest.raises(ConfigError) as caught:
        load_job(f"{BASE}{line}\n")

    (problem,) = caught.value.problems
    assert problem.line == 5
    assert problem.suggestion == suggestion
