"""The cards themselves: access, partitions, links, health."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sky_monarch.doctor.devices import Device
from sky_monarch.doctor.finding import Finding, error, info, ok, warning
from sky_monarch.doctor.tree import Tree

__all__ = ["check"]

_LEAKED_BYTES = 1 << 30
_KERNEL_FAULTS = re.compile(
    r"amdgpu.*(?:GPU reset|ring .* timeout|\bhang\b|uncorrectable|RAS: .*error)", re.IGNORECASE
)


def check(tree: Tree, found: Sequence[Device], tools: Mapping[str, str]) -> Iterator[Finding]:
    """Everything about the cards."""
    names = Counter(device.model or device.arch for device in found)
    if len(names) > 1:
        yield warning(
            "gpu.mixed",
            "different accelerators in one host",
            "train on one kind: RCCL #2189 hangs on mixed ones",
        )
    yield from _access(tree, found)
    yield from _partitions(tree, found)
    yield from _links(found)
    yield from _health(tree, found)
    faults = [line.strip() for line in tools.get("dmesg", "").splitlines() if _KERNEL_FAULTS.search(line)]
    if faults:
        yield warning(
            "gpu.kernel_log",
            f"{len(faults)} fault(s) of amdgpu in the kernel's log, the last: {faults[-1][:200]}",
            "find the device that it names; drain the host when it comes again",
        )


def _access(tree: Tree, found: Sequence[Device]) -> Iterator[Finding]:
    closed = [
        path
        for path in ("dev/kfd", *sorted({device.render for device in found}))
        if not os.access(tree.root / path, os.R_OK | os.W_OK)
    ]
    if not closed:
        yield ok("gpu.access", "/dev/kfd and the render nodes can be opened")
        return
    yield error(
        "gpu.access",
        f"this user cannot open {', '.join('/' + path for path in closed[:4])}"
        + (f" and {len(closed) - 4} more" if len(closed) > 4 else ""),
        "join their groups (`usermod -aG render,video $USER`, then log in again); in a container pass "
        "--device=/dev/kfd --device=/dev/dri --group-add=render",
    )


def _partitions(tree: Tree, found: Sequence[Device]) -> Iterator[Finding]:
    compute = {
        device.pci: tree.text(f"{device.sysfs}/current_compute_partition") for device in reversed(found)
    }
    memory = {device.pci: tree.text(f"{device.sysfs}/current_memory_partition") for device in reversed(found)}
    modes = sorted({mode for mode in compute.values() if mode})
    if len(modes) > 1:
        yield error(
            "gpu.partition",
            f"the cards are partitioned differently: {', '.join(modes)}",
            "`amd-smi set --compute-partition SPX` on all of them, while nothing runs",
        )
    elif modes and modes != ["SPX"]:
        each = len(found) // len(compute)
        yield warning(
            "gpu.partition",
            f"compute partition {modes[0]}: each of {len(compute)} card(s) shows as {each} devices, each with a "
            "part of its memory",
            "`amd-smi set --compute-partition SPX` unless the job is made for it; RCCL needs its own tuning there",
        )
    elif modes:
        yield ok("gpu.partition", "compute partition SPX")
    unusual = sorted({mode for mode in memory.values() if mode and mode != "NPS1"})
    if unusual:
        yield warning(
            "gpu.memory_partition",
            f"memory partition {', '.join(unusual)}: memory is divided between the parts of a card",
            "`amd-smi set --memory-partition NPS1` unless the job is made for it",
        )


def _links(found: Sequence[Device]) -> Iterator[Finding]:
    nodes = {device.node for device in found}
    missing = [
        (one, other)
        for one in found
        for other in found
        if one.node < other.node and (other.node not in one.peers or one.node not in other.peers)
    ]
    if len(nodes) < 2:
        return
    if not missing:
        yield ok("gpu.links", "all devices reach each other over xGMI")
    elif not any(device.peers & nodes for device in found):
        yield info("gpu.links", "no device reaches another over xGMI: they exchange over PCIe")
    elif found[0].arch == "gfx90a":
        yield info(
            "gpu.links", f"{len(missing)} pair(s) of devices without a direct xGMI link, as MI200 hosts have"
        )
    else:
        one, other = missing[0]
        yield warning(
            "gpu.links",
            f"{len(missing)} pair(s) of devices without an xGMI link, such as {one} and {other}",
            "`amd-smi topology` and `amd-smi xgmi` show which; reseat or replace the baseboard",
        )


def _errors(text: str) -> dict[str, int]:
    return {kind: int(count) for kind, count in re.findall(r"(ue|ce)\s*:\s*(\d+)", text)}


def _health(tree: Tree, found: Sequence[Device]) -> Iterator[Finding]:
    healthy = True
    running = bool(tree.names("sys/class/kfd/kfd/proc"))
    seen = set()
    for device in found:
        if device.pci in seen:
            continue  # a partition of a card that was looked at
        seen.add(device.pci)
        counts: Counter[str] = Counter()
        for name in tree.names(f"{device.sysfs}/ras"):
            if name.endswith("_err_count"):
                counts.update(_errors(tree.text(f"{device.sysfs}/ras/{name}") or ""))
        if counts["ue"]:
            healthy = False
            yield error(
                "gpu.memory_errors",
                f"{device} counts {counts['ue']} uncorrectable error(s): results may be wrong, or the device resets",
                "reset it (`amd-smi reset --gpureset`) and replace it when they come again",
            )
        elif counts["ce"]:
            yield info("gpu.memory_errors", f"{device} counts {counts['ce']} corrected error(s)")
        bad = [
            line
            for line in (tree.text(f"{device.sysfs}/ras/gpu_vram_bad_pages") or "").splitlines()
            if line.strip()
        ]
        if bad:
            healthy = False
            yield warning(
                "gpu.bad_pages", f"{device} has retired {len(bad)} page(s) of memory", "plan to replace it"
            )
        used = tree.number(f"{device.sysfs}/mem_info_vram_used") or 0
        if used > _LEAKED_BYTES and not running:
            healthy = False
            yield warning(
                "gpu.leaked_memory",
                f"{device} has {used / 2**30:.1f} GiB in use and no process has a device open",
                "a killed process left it: reset the device (`amd-smi reset --gpureset`) or restart the host",
            )
        visible, total = (
            tree.number(f"{device.sysfs}/mem_info_{name}_total") for name in ("vis_vram", "vram")
        )
        if visible is not None and total is not None and visible < total:
            healthy = False
            yield warning(
                "gpu.large_bar",
                f"{device} shows {visible >> 20} of {total >> 20} MiB to the bus: no peer can read the rest",
                "enable large BAR (above 4G decoding, resizable BAR) in the firmware",
            )
    if healthy:
        yield ok("gpu.health", "no uncorrectable errors, retired pages or leaked memory")
