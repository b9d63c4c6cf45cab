"""What the vendors' libraries and the devices themselves say, and known faults of their versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sky_monarch.doctor import paths
from sky_monarch.doctor.devices import Device
from sky_monarch.doctor.finding import Finding, error, info, ok, warning

__all__ = ["check"]

#: RCCL's versions that are known to do harm: from, to (both included), what, and what helps.
_KNOWN_RCCL = (
    (
        (0, 0, 0),
        (2, 21, 4),
        "turns GPUDirect off on kernels 6.4 and later (rccl #1328)",
        "use ROCm 6.3 or later",
    ),
    (
        (2, 30, 4),
        (2, 30, 4),
        "never ends a non-blocking start when a rank is missing (rocm-systems #10796)",
        "sky-monarch gives it a deadline; a ROCm with the fix (10.1) needs none",
    ),
)


def check(
    found: Sequence[Device], report: Mapping[str, Any] | None, env: Mapping[str, str], torch_hip: str | None
) -> Iterator[Finding]:
    """Everything about libraries and what they say of the devices."""
    if found and torch_hip == "":
        yield error(
            "torch.build",
            "torch is not a ROCm build: it does not see these devices",
            "install it from https://download.pytorch.org/whl/ (the index of your ROCm release)",
        )
    elif torch_hip:
        yield ok("torch.build", f"torch is built for HIP {torch_hip}")
    if report is None:
        return
    if "failed" in report:
        yield error(
            "gpu.smoke",
            f"trying the libraries and devices {report['failed']}",
            "a device hangs or a library crashes: look at `dmesg | grep amdgpu`, reset the device or restart the host",
        )
        return
    if report["simulated"]:
        yield warning(
            "gpu.simulated",
            "SIMULATED: these devices are a software double's",
            "never train on it; unset SKY_MONARCH_*_LIB",
        )
    for library in report["libraries"]:
        yield from _library(library, needed=report["platform"] != "host")
    yield from _dmabuf(report)
    if report["error"]:
        yield error("gpu.runtime", report["error"], "reinstall the driver and the runtime so that they match")
    yield from _devices(found, report, env)


def _dmabuf(report: Mapping[str, Any]) -> Iterator[Finding]:
    """By which way a NIC gets at a device's memory, as far as the libraries have a say."""
    can = {
        library["name"]: library["capabilities"] for library in report["libraries"] if not library["error"]
    }
    runtime = next((name for name in ("HIP", "CUDA") if name in can), None)
    if runtime is None:
        return
    lacking = [name for name in (runtime, "verbs") if name in can and "dmabuf" not in can[name]]
    if lacking:
        yield info(
            "gpu.dmabuf",
            f"{' and '.join(lacking)} cannot pass a device's memory on as a dmabuf: it is reached by peer memory, or "
            "staged through the host",
            "ROCm 7 and rdma-core 34 can",
        )
    else:
        yield ok(
            "gpu.dmabuf", f"{' and '.join(sorted({runtime, *can} & {runtime, 'verbs'}))} can pass dmabufs"
        )


def _exchange(found: Mapping[str, Any] | None) -> Iterator[Finding]:
    if found is None:
        return
    if "failed" in found:
        yield error(
            "gpu.exchange",
            f"the devices do not exchange: {found['failed']}",
            "try again with NCCL_DEBUG=INFO; a link or a device between them is at fault where single ones work",
        )
        return
    speeds = {(int(one), int(other)): float(gibps) for one, other, gibps in found["pairs"]}
    slow, fast = min(speeds.values()), max(speeds.values())
    yield info(
        "gpu.exchange",
        f"all_reduce of {found['bytes'] >> 20} MiB: {found['all_reduce_gibps']:.1f} GiB/s (bus); between two devices "
        f"{slow:.1f} to {fast:.1f} GiB/s each way",
    )
    if slow < 0.7 * fast:
        one, other = min(speeds, key=lambda pair: speeds[pair])
        yield warning(
            "gpu.exchange",
            f"devices {one} and {other} exchange at {slow:.1f} GiB/s where others do at {fast:.1f}",
            "`amd-smi topology` shows what is between them; a link may have trained down (`amd-smi xgmi`)",
        )


def _library(library: Mapping[str, Any], *, needed: bool) -> Iterator[Finding]:
    name = library["name"]
    check_name = f"library.{name.lower()}"
    if library["error"]:
        if needed and name != "verbs":
            yield error(
                check_name,
                library["error"],
                "install the vendor's runtime or a build of torch that brings it, or name the file: "
                f"SKY_MONARCH_{'CUDART' if name == 'CUDA' else name}_LIB",
            )
        else:
            yield info(check_name, library["error"])
        return
    version = f" {library['version']}" if library["version"] else ""
    can = f"; can {', '.join(library['capabilities'])}" if library["capabilities"] else ""
    yield ok(check_name, f"{name}{version} at {library['path']} ({library['origin']}){can}")
    if len(library["copies"]) > 1:
        yield error(
            check_name,
            f"{len(library['copies'])} copies of {name} are loaded ({', '.join(library['copies'])}): that crashes",
            "leave one: unset LD_LIBRARY_PATH and LD_PRELOAD where torch brings its own",
        )
    if name == "RCCL":
        numbers = tuple(int(part) for part in re.findall(r"\d+", library["version"] or ""))
        for low, high, what, fix in _KNOWN_RCCL:
            if low <= numbers <= high:
                yield warning("library.rccl", f"RCCL {library['version']} {what}", fix)


def _devices(found: Sequence[Device], report: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Finding]:
    tried = report["devices"]
    masked = any(
        name in env for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    )
    opened = any(library["name"] == "HIP" and not library["error"] for library in report["libraries"])
    if (
        opened
        and report["platform"] == "rocm"
        and len(tried) != len(found)
        and not masked
        and not report["simulated"]
    ):
        yield error(
            "gpu.count",
            f"HIP sees {len(tried)} device(s) and the kernel {len(found)}",
            "a card is hidden from the runtime: compare `rocminfo` with `ls /sys/class/kfd/kfd/topology/nodes`",
        )
    for device in tried:
        where = f"device {device['ordinal']} ({device['pci']})"
        if device["error"]:
            yield error("gpu.smoke", f"{where}: {device['error']}", "reset it, or leave it out by its mask")
        elif not device["works"]:
            yield error("gpu.smoke", f"{where} gives back other bytes than it was sent", "replace it")
        elif device["to_device_gibps"] is not None:
            to, back, inside = (device[f"{way}_gibps"] for way in ("to_device", "from_device", "inside"))
            yield info(
                "gpu.copies", f"{where}: {to:.1f} GiB/s to it, {back:.1f} from it, {inside:.1f} inside"
            )
    if tried and all(device["works"] for device in tried):
        yield ok("gpu.smoke", f"{len(tried)} device(s) gave back what they were sent")
    speeds = [device["to_device_gibps"] for device in tried if device["to_device_gibps"]]
    if len(speeds) > 1 and min(speeds) < 0.7 * max(speeds):
        slow = min(tried, key=lambda device: device["to_device_gibps"] or float("inf"))
        yield warning(
            "gpu.copies",
            f"device {slow['ordinal']} takes copies at {min(speeds):.1f} GiB/s where another does at {max(speeds):.1f}",
            "compare the widths of their PCI links (`lspci -vv`, LnkSta)",
        )
    yield from _exchange(report.get("exchange"))
    yield from paths.check(report.get("paths"))
    if report["host_copy_gibps"] is not None:
        yield info(
            "host.copies", f"{report['host_copy_gibps']:.1f} GiB/s inside the host's memory, one thread"
        )
