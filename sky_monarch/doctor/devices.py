"""The accelerators that the kernel's KFD knows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sky_monarch.doctor.tree import Tree

__all__ = ["Device", "amd_functions", "devices"]

_NODES = "sys/class/kfd/kfd/topology/nodes"
_XGMI = 11

#: PCI device ids, as the pci.ids database names them.
_MODELS = {
    0x738C: "MI100",
    0x740C: "MI250",
    0x7408: "MI250X",
    0x740F: "MI210",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A5: "MI325X",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of HIP: a card, a die of one, or a partition of one.

    Attributes:
        index: Its place among the devices, as ``ROCR_VISIBLE_DEVICES`` counts it.
        node: Its KFD node.
        model: Such as ``MI300X``; None for one that this version does not know.
        arch: Such as ``gfx942``.
        uuid: Its unique id, 16 hexadecimal digits.
        pci: PCI address of its card, such as ``0000:c1:00.0``.
        render: Its device file, such as ``dev/dri/renderD128``.
        sysfs: The folder of its PCI function.
        peers: KFD nodes that it reaches over xGMI.
    """

    index: int
    node: int
    model: str | None
    arch: str
    uuid: str
    pci: str
    render: str
    sysfs: str
    peers: frozenset[int]

    def __str__(self) -> str:
        """For a message."""
        return f"device {self.index} ({self.model or self.arch} at {self.pci})"


def _arch(version: int) -> str:
    """``gfx942`` of 90402: major, minor and stepping, the last two in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def devices(tree: Tree) -> list[Device]:
    """Every device, in the driver's order."""
    found: list[Device] = []
    for name in tree.names(_NODES):
        properties = tree.properties(f"{_NODES}/{name}/properties")
        if not name.isdigit() or properties.get("simd_count", 0) <= 0:
            continue  # a processor
        location = properties.get("location_id", 0)
        minor = properties.get("drm_render_minor", 0)
        links = [
            tree.properties(f"{_NODES}/{name}/{kind}/{link}/properties")
            for kind in ("io_links", "p2p_links")
            for link in tree.names(f"{_NODES}/{name}/{kind}")
        ]
        found.append(
            Device(
                index=len(found),
                node=int(name),
                model=_MODELS.get(properties.get("device_id", 0)),
                arch=_arch(properties.get("gfx_target_version", 0)),
                uuid=f"{properties.get('unique_id', 0):016x}",
                # The bits above the function number a partition of the card.
                pci=f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}"
                f":{location >> 3 & 0x1F:02x}.{location & 7}",
                render=f"dev/dri/renderD{minor}",
                sysfs=f"sys/class/drm/renderD{minor}/device",
                peers=frozenset(
                    link["node_to"] for link in links if link.get("type") == _XGMI and "node_to" in link
                ),
            )
        )
    return found


def amd_functions(tree: Tree) -> list[str]:
    """PCI functions of AMD that compute or display, whether a driver has them or not."""
    return [
        name
        for name in tree.names("sys/bus/pci/devices")
        if tree.number(f"sys/bus/pci/devices/{name}/vendor") == 0x1002
        and re.match(r"0x(03|12)", tree.text(f"sys/bus/pci/devices/{name}/class") or "")
    ]
