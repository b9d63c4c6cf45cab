"""Masks, and variables of RCCL and ROCm that are known to do harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sky_monarch.doctor.devices import Device
from sky_monarch.doctor.finding import Finding, error, info, ok, warning
from sky_monarch.doctor.network import ports
from sky_monarch.doctor.tree import Tree
from sky_monarch.errors import ConfigError

__all__ = ["check"]

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_PINNED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


def check(tree: Tree, found: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """Everything about the environment."""
    yield from _masks(found, env)
    told = {**_conf(tree, env), **{name: value for name, value in env.items() if value}}
    pinned = [f"{name}={told[name]}" for name in _PINNED if name in told]
    if pinned:
        yield warning(
            "env.rccl_pinned",
            f"{', '.join(pinned)}: what was best for one size and topology is slow for the others, or hangs",
            f"unset {', '.join(text.partition('=')[0] for text in pinned)}: RCCL measures and chooses",
        )
    if "HSA_OVERRIDE_GFX_VERSION" in told:
        yield warning(
            "env.gfx_override",
            f"HSA_OVERRIDE_GFX_VERSION={told['HSA_OVERRIDE_GFX_VERSION']}: kernels of another device are run",
            "unset it: Instinct devices need no override",
        )
    yield from _named(tree, told)


def _masks(found: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    from sky_monarch import _core

    masks = {name: env[name] for name in (_ROCR, _HIP, _CUDA) if name in env}
    said = ", ".join(f"{name}={value}" for name, value in masks.items())
    try:
        visible = _core.visible_devices(
            [device.uuid for device in found], rocr=env.get(_ROCR), hip=env.get(_HIP), cuda=env.get(_CUDA)
        )
    except ConfigError as refused:
        yield error(
            "env.masks", str(refused).partition(": ")[2], "set one of them, to indices that are there"
        )
        return
    if not visible:
        yield error("env.masks", f"{said} leaves no device of {len(found)}", "set one of them, or unset all")
    elif _ROCR in masks and len(masks) > 1:
        yield warning(
            "env.masks",
            f"{said}: the second counts inside what the first leaves, device(s) {visible} of the host",
            "set only one of them (Slurm sets ROCR_VISIBLE_DEVICES)",
        )
    elif set(masks) == {_CUDA}:
        yield warning(
            "env.masks",
            f"{said}: HIP takes it as an alias that its newer documentation no longer names",
            f"set {_HIP} instead",
        )
    elif masks:
        yield ok("env.masks", f"{said}: device(s) {visible}")


def _conf(tree: Tree, env: Mapping[str, str]) -> dict[str, str]:
    """What RCCL's own file of settings says; the environment beats it."""
    path = env.get("NCCL_CONF_FILE", "/etc/rccl.conf").lstrip("/")
    lines = (line.partition("#")[0].partition("=") for line in (tree.text(path) or "").splitlines())
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


def _named(tree: Tree, told: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that name an interface, a NIC or an index."""
    interfaces = set(tree.names("sys/class/net"))
    wanted = told.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not wanted.startswith("^") and interfaces:
        exact = wanted.startswith("=")
        names = [name for name in wanted.lstrip("=").split(",") if name]
        if not any(one == name if exact else one.startswith(name) for one in interfaces for name in names):
            yield error(
                "env.socket_interface",
                f"NCCL_SOCKET_IFNAME={wanted} names no interface of this host ({', '.join(sorted(interfaces))})",
                "unset it, or name one that every host has",
            )
    every = ports(tree)
    wanted = told.get("NCCL_IB_HCA", "")
    if wanted and not wanted.startswith("^") and every:
        exact = wanted.startswith("=")
        names = [name.partition(":")[0] for name in wanted.lstrip("=").split(",") if name]
        nics = {port.nic for port in every}
        absent = [
            name for name in names if not any(nic == name if exact else nic.startswith(name) for nic in nics)
        ]
        if absent:
            yield error(
                "env.rdma_nic",
                f"NCCL_IB_HCA={wanted}: this host has no {', '.join(absent)} (it has {', '.join(sorted(nics))})",
                "unset it, or name those of this host",
            )
    index = told.get("NCCL_IB_GID_INDEX", "")
    indices = sorted({port.roce_v2_index for port in every if port.active and port.roce_v2_index is not None})
    if index.isdigit() and indices and int(index) not in indices:
        yield error(
            "env.gid_index",
            f"NCCL_IB_GID_INDEX={index}, and the RoCE v2 address over IPv4 is at {indices}",
            "unset it, or set it to that",
        )
    if told.get("NCCL_DMABUF_ENABLE") == "0":
        yield info(
            "env.dmabuf",
            "NCCL_DMABUF_ENABLE=0: RCCL uses no dmabuf",
            "unset it unless dmabuf is known to fail",
        )
