"""The kernel: IOMMU, NUMA balancing, PCI access control, and by which way a NIC reaches a device's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from sky_monarch.doctor.finding import Finding, info, ok, warning
from sky_monarch.doctor.tree import Tree

__all__ = ["check", "direct_path", "release"]

_PEER_MEMORY = "ib_register_peer_memory_client"
_P2P = "pci_p2pdma_add_resource"


def release(tree: Tree) -> tuple[int, int] | None:
    """The kernel's major and minor number."""
    match = re.match(r"(\d+)\.(\d+)", tree.text("proc/sys/kernel/osrelease") or "")
    return (int(match[1]), int(match[2])) if match else None


def direct_path(tree: Tree) -> Literal["dmabuf", "peermem", "staging", "unknown"]:
    """How a NIC can reach memory of a device, as far as the kernel says."""
    if any(tree.exists(f"sys/kernel/{folder}memory_peers/amdkfd") for folder in ("mm/", "")):
        return "peermem"
    symbols = tree.kernel_symbols({_PEER_MEMORY, _P2P})
    config = tree.kernel_config(tree.text("proc/sys/kernel/osrelease") or "")
    if config is not None:
        on = set(re.findall(r"^(CONFIG_\w+)=[ym]", config, re.MULTILINE))
        if {"CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY"} <= on:
            return "dmabuf"
        return "peermem" if _PEER_MEMORY in symbols else "staging"
    if _PEER_MEMORY in symbols:
        return "peermem"
    # Only the configuration tells of MOVE_NOTIFY; a container has none.
    return "unknown"


def check(tree: Tree) -> Iterator[Finding]:
    """Everything about the kernel."""
    words = (tree.text("proc/cmdline") or "").split()
    virtual = "hypervisor" in (tree.text("proc/cpuinfo") or "")
    passed = {"iommu=pt", "amd_iommu=pt", "intel_iommu=pt", "iommu.passthrough=1"} & set(words)
    off = {"iommu=off", "amd_iommu=off", "intel_iommu=off"} & set(words)
    if passed or off:
        yield ok("kernel.iommu", f"IOMMU: {', '.join(sorted(passed | off))}")
    elif virtual and not tree.names("sys/class/iommu"):
        yield ok("kernel.iommu", "a virtual machine without an IOMMU of its own")
    else:
        yield warning(
            "kernel.iommu",
            "iommu=pt is not on the kernel's command line: copies between devices can hang (RCCL warns of it)",
            "add iommu=pt to GRUB_CMDLINE_LINUX, run update-grub, restart the host",
        )
    if tree.number("proc/sys/kernel/numa_balancing"):
        yield warning(
            "kernel.numa_balancing",
            "NUMA balancing is on: it moves pages under a device that copies them (slow, and RCCL #1377: no GPUDirect)",
            "`sysctl -w kernel.numa_balancing=0`, and in /etc/sysctl.d",
        )
    else:
        yield ok("kernel.numa_balancing", "NUMA balancing is off")
    if not virtual:
        yield from _access_control(tree)
    path = direct_path(tree)
    if path == "staging":
        yield warning(
            "kernel.gpudirect",
            "no NIC reaches a device's memory: the kernel has neither dmabuf (CONFIG_PCI_P2PDMA and "
            "CONFIG_DMABUF_MOVE_NOTIFY) nor AMD's peer memory; traffic is staged through the host",
            "use a kernel that has both options, or install amdgpu-dkms with its peer memory",
        )
    elif path == "unknown":
        yield info(
            "kernel.gpudirect",
            "whether NICs reach devices' memory cannot be seen here (no kernel configuration)",
        )
    else:
        yield ok("kernel.gpudirect", f"NICs reach devices' memory by {path}")


def _access_control(tree: Tree) -> Iterator[Finding]:
    """ACS sends traffic between two devices up to the root complex; on bare metal it is only in the way."""
    on, seen = [], False
    for name in tree.names("sys/bus/pci/devices"):
        if not (tree.text(f"sys/bus/pci/devices/{name}/class") or "").startswith("0x0604"):
            continue
        control = _acs_control(tree.data(f"sys/bus/pci/devices/{name}/config"))
        seen = seen or control is not None
        # Bits: 2 request redirect, 3 completion redirect.
        if control is not None and control & 0b1100:
            on.append(name)
    if on:
        yield warning(
            "kernel.acs",
            f"PCI access control redirects peer traffic at {len(on)} bridge(s), such as {on[0]}: slow, or it hangs",
            "switch ACS off in the firmware, or with setpci at each start",
        )
    elif seen:
        yield ok("kernel.acs", "PCI access control redirects nothing")


def _acs_control(config: bytes) -> int | None:
    """The ACS control register of a bridge; None where there is none, or only root could read it."""
    offset = 0x100
    for _ in range(64):
        if offset < 0x100 or offset + 8 > len(config):
            return None
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == 0x000D:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return None
