"""Trees of /sys, /proc and /dev as hosts with AMD accelerators have them, written below a folder.

Made from the kernel's documentation and AMD's tools, not recorded: no such host was at hand.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

NODES = "sys/class/kfd/kfd/topology/nodes"
GIB = 1 << 30

#: model: PCI device id, gfx_target_version, devices of a card, memory of a card.
MODELS = {
    "MI250": (0x740C, 90010, 2, 128),
    "MI300X": (0x74A1, 90402, 1, 192),
    "MI325X": (0x74A5, 90402, 1, 256),
    "MI355X": (0x75A3, 90500, 1, 288),
}


@dataclass
class GpuHost:
    """A host, healthy until something is written over it."""

    root: Path
    model: str = "MI300X"
    cards: int = 4
    compute: str = "SPX"
    release: str = "6.8.0-60-generic"
    #: Name and PCI vendor.
    nics: dict[str, int] = field(default_factory=lambda: {f"mlx5_{index}": 0x15B3 for index in range(4)})

    _made: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        device_id, gfx, dies, memory = MODELS[self.model]
        each = {"SPX": 1, "DPX": 2, "CPX": 8}[self.compute] * dies
        self.devices = self.cards * each
        for node in (0, 1):
            self.write(f"{NODES}/{node}/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\n")
        for index in range(self.devices):
            card, part = divmod(index, each)
            bus = 0x05 + 0x10 * card + (part if dies > 1 else 0)
            render = 128 + index
            partition = part << 28 if dies == 1 else 0
            self.write(
                f"{NODES}/{index + 2}/properties",
                f"cpu_cores_count 0\nsimd_count 304\ngfx_target_version {gfx}\ndevice_id {device_id}\nvendor_id 4098\n"
                f"unique_id {0xABC0_0000_0000_0000 + index}\nlocation_id {bus << 8 | partition}\ndomain 0\n"
                f"drm_render_minor {render}\n",
            )
            others = [other for other in range(self.devices) if other != index]
            for number, other in enumerate(others):
                self.write(
                    f"{NODES}/{index + 2}/io_links/{number}/properties",
                    f"type 11\nnode_from {index + 2}\nnode_to {other + 2}\nweight 15\n",
                )
            self.write(f"dev/dri/renderD{render}", "")
            self.write(f"sys/bus/pci/devices/0000:{bus:02x}:00.0/vendor", "0x1002")
            self.write(f"sys/bus/pci/devices/0000:{bus:02x}:00.0/class", "0x120000")
            sysfs = self.sysfs(index)
            if dies == 1:
                self.write(f"{sysfs}/current_compute_partition", self.compute)
                self.write(f"{sysfs}/current_memory_partition", "NPS1")
            self.write(f"{sysfs}/numa_node", str(card * 2 // max(self.cards, 1)))
            self.write(f"{sysfs}/ras/umc_err_count", "ue: 0\nce: 0")
            self.write(f"{sysfs}/ras/gpu_vram_bad_pages", "")
            self.write(f"{sysfs}/mem_info_vram_total", str(memory * GIB // each))
            self.write(f"{sysfs}/mem_info_vis_vram_total", str(memory * GIB // each))
            self.write(f"{sysfs}/mem_info_vram_used", str(300 << 20))
        self.write("dev/kfd", "")
        self.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro iommu=pt")
        self.write("proc/cpuinfo", "flags : fpu sse")
        self.write("proc/sys/kernel/osrelease", self.release)
        self.write("proc/sys/kernel/numa_balancing", "0")
        self.write(
            f"boot/config-{self.release}",
            "CONFIG_PCI_P2PDMA=y\nCONFIG_DMABUF_MOVE_NOTIFY=y\n# CONFIG_X is not set\n",
        )
        self.write(
            "proc/kallsyms", "0000000000000000 T pci_p2pdma_add_resource\n0000000000000000 T vfs_read\n"
        )
        self.bridge(control=0)
        self.write("sys/class/net/eth0/mtu", "1500")
        for index, (nic, vendor) in enumerate(self.nics.items()):
            self.nic(nic, vendor, numa=index * 2 // len(self.nics))
        if self.nics:
            self.write("dev/infiniband/uverbs0", "")

    def write(self, path: str, text: str | bytes) -> None:
        folder, _, name = path.rpartition("/")
        if folder not in self._made:  # most of the cost of a tree
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            self._made.add(folder)
        with open(f"{self.root}/{folder}/{name}", "wb") as file:  # noqa: PTH123
            file.write(text.encode() if isinstance(text, str) else text)

    def sysfs(self, index: int) -> str:
        return f"sys/class/drm/renderD{128 + index}/device"

    def nic(self, name: str, vendor: int, *, numa: int = 0, index: int = 3, active: bool = True) -> None:
        device, port = f"sys/class/infiniband/{name}/device", f"sys/class/infiniband/{name}/ports/1"
        self.write(f"{device}/vendor", f"0x{vendor:04x}")
        self.write(f"{device}/numa_node", str(numa))
        self.write(f"{device}/net/rdma{name}/mtu", "9000")
        self.write(f"{port}/state", "4: ACTIVE" if active else "1: DOWN")
        self.write(f"{port}/link_layer", "Ethernet")
        self.write(f"{port}/rate", "400 Gb/sec (4X NDR)")
        gids = {0: "fe80:0000:0000:0000:0000:0000:0000:0001", 1: "fe80:0000:0000:0000:0000:0000:0000:0001"}
        gids[index] = "0000:0000:0000:0000:0000:ffff:0a01:0203"
        for number, gid in gids.items():
            self.write(f"{port}/gids/{number}", gid)
            self.write(f"{port}/gid_attrs/types/{number}", "RoCE v2" if number else "IB/RoCE v1")

    def bridge(self, *, control: int) -> None:
        """A PCI bridge with access control: two extended capabilities, the second of them ACS."""
        config = bytearray(0x200)
        config[0x100:0x104] = struct.pack("<I", 0x140 << 20 | 1 << 16 | 0x0001)
        config[0x140:0x148] = struct.pack("<IHH", 1 << 16 | 0x000D, 0x5F, control)
        self.write("sys/bus/pci/devices/0000:00:01.0/class", "0x060400")
        self.write("sys/bus/pci/devices/0000:00:01.0/vendor", "0x1022")
        self.write("sys/bus/pci/devices/0000:00:01.0/config", bytes(config))


def report(devices: int = 4, **changes: object) -> dict[str, object]:
    """What the libraries of a healthy host say."""

    def library(name: str, version: str) -> dict[str, object]:
        path = f"/opt/rocm/lib/lib{name.lower()}.so"
        return {
            "name": name, "path": path, "origin": "linker", "version": version, "simulated": False, "error": None,
            "copies": [path], "capabilities": ["dmabuf"],
        }  # fmt: skip

    found: dict[str, object] = {
        "platform": "rocm",
        "reason": "/dev/kfd is here",
        "simulated": False,
        "error": None,
        "rdma_devices": [],
        "host_copy_gibps": None,
        "libraries": [library("HIP", "70125424"), library("RCCL", "2.27.7"), library("verbs", "")],
        "devices": [
            {
                "ordinal": index, "pci": f"0000:{5 + 16 * index:02x}:00.0", "works": True, "error": None,
                "to_device_gibps": None, "from_device_gibps": None, "inside_gibps": None,
            }
            for index in range(devices)
        ],
    }  # fmt: skip
    return {**found, **changes}
