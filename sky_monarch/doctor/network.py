"""RDMA NICs: links, addresses, vendors, and what a process needs to use them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sky_monarch.doctor.devices import Device
from sky_monarch.doctor.finding import Finding, error, info, ok, warning
from sky_monarch.doctor.limits import UNLIMITED, Limits
from sky_monarch.doctor.tree import Tree

__all__ = ["Port", "check", "ports"]

_ROOT = "sys/class/infiniband"
#: Bytes of an Ethernet frame that carries an RDMA MTU of 4096 with its headers.
_WHOLE_PAGE_MTU = 4200
_IPV4_GID = re.compile(r"0000:0000:0000:0000:0000:ffff:(?!0000:0000)[0-9a-f]{4}:[0-9a-f]{4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of an RDMA NIC.

    Attributes:
        nic: Such as ``mlx5_0``.
        number: From 1.
        vendor: PCI vendor id.
        active: Its link is up.
        ethernet: RoCE, not InfiniBand.
        rate_gbps: Gbit/s; 0 where it is not known.
        roce_v2_index: Index of its RoCE v2 address over IPv4, which NCCL_IB_GID_INDEX names; None where it has none.
        mtu: Of its network interface; None where it has none.
        numa: NUMA node; -1 where it has none.
    """

    nic: str
    number: int
    vendor: int
    active: bool
    ethernet: bool
    rate_gbps: float
    roce_v2_index: int | None
    mtu: int | None
    numa: int


def ports(tree: Tree) -> list[Port]:
    """Every port of every RDMA NIC."""
    found = []
    for nic in tree.names(_ROOT):
        device = f"{_ROOT}/{nic}/device"
        mtus = [tree.number(f"{device}/net/{name}/mtu") for name in tree.names(f"{device}/net")]
        numa = tree.number(f"{device}/numa_node")
        for number in tree.names(f"{_ROOT}/{nic}/ports"):
            port = f"{_ROOT}/{nic}/ports/{number}"
            rate = re.match(r"[\d.]+", tree.text(f"{port}/rate") or "")
            found.append(
                Port(
                    nic=nic,
                    number=int(number),
                    vendor=tree.number(f"{device}/vendor") or 0,
                    active="ACTIVE" in (tree.text(f"{port}/state") or ""),
                    ethernet=tree.text(f"{port}/link_layer") == "Ethernet",
                    rate_gbps=float(rate[0]) if rate else 0.0,
                    roce_v2_index=_roce_v2(tree, port),
                    mtu=next((mtu for mtu in mtus if mtu is not None), None),
                    numa=-1 if numa is None else numa,
                )
            )
    return found


def _roce_v2(tree: Tree, port: str) -> int | None:
    for index in tree.names(f"{port}/gids"):
        kind = tree.text(f"{port}/gid_attrs/types/{index}") or ""
        if "RoCE v2" in kind and _IPV4_GID.fullmatch(tree.text(f"{port}/gids/{index}") or ""):
            return int(index)
    return None


def check(tree: Tree, found: Sequence[Device], limits: Limits | None) -> Iterator[Finding]:
    """Everything about RDMA NICs; a host without any trains over TCP."""
    every = ports(tree)
    up = [port for port in every if port.active]
    if not every:
        yield info("network.rdma", "no RDMA NICs: traffic between hosts goes over TCP")
        return
    for port in every:
        if not port.active:
            yield warning(
                "network.link",
                f"port {port.number} of {port.nic} is not active",
                f"check its cable and switch port (`rdma link show {port.nic}/{port.number}`), or leave it out of "
                "NCCL_IB_HCA",
            )
    yield from _usable(tree, up, limits)
    yield from _alike(up)
    yield from _addresses(up)
    cards = len({device.pci for device in found})
    nics = len({port.nic for port in up})
    if up and nics < cards:
        yield info("network.rails", f"{nics} active RDMA NIC(s) for {cards} card(s): cards share them")
    places = {numa for device in found if (numa := tree.number(f"{device.sysfs}/numa_node")) is not None}
    far = sorted(places - {port.numa for port in up} - {-1})
    if up and far:
        yield info(
            "network.rails", f"no active RDMA NIC on NUMA node(s) {far}: their devices cross the host for it"
        )


def _usable(tree: Tree, up: Sequence[Port], limits: Limits | None) -> Iterator[Finding]:
    if not up:
        yield error("network.rdma", "no RDMA NIC has an active port", "see the findings of network.link")
        return
    verbs = [name for name in tree.names("dev/infiniband") if name.startswith("uverbs")]
    if not any(os.access(tree.root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in verbs):
        yield error(
            "network.verbs",
            "this user can open no /dev/infiniband/uverbs*: RDMA fails, or falls back to TCP",
            "load ib_uverbs; in a container pass --device=/dev/infiniband",
        )
    if limits is not None and limits.locked_bytes != UNLIMITED:
        yield error(
            "network.locked_memory",
            f"at most {limits.locked_bytes >> 10} KiB of memory may be locked: registering buffers for RDMA fails",
            "`ulimit -l unlimited` (memlock in /etc/security/limits.d, LimitMEMLOCK=infinity for services); in a "
            "container pass --ulimit memlock=-1",
        )


def _alike(up: Sequence[Port]) -> Iterator[Finding]:
    vendors = sorted({re.sub(r"[_\d]+$", "", port.nic) for port in up})
    if len({port.vendor for port in up}) > 1:
        by_kind = {kind: [port.nic for port in up if port.nic.startswith(kind)] for kind in vendors}
        most = max(by_kind.values(), key=len)
        yield warning(
            "network.mixed",
            f"active RDMA NICs of different vendors ({', '.join(vendors)}): RCCL takes all of them, the slow ones too",
            f"name those that train: NCCL_IB_HCA={','.join(most)}",
        )
    rates = sorted({port.rate_gbps for port in up})
    if len(rates) > 1:
        yield warning(
            "network.rate",
            f"active RDMA NICs of different rates: {', '.join(f'{rate:g}' for rate in rates)} Gbit/s; the slowest sets "
            "the pace",
            "leave the slow ones out of NCCL_IB_HCA, or find out why a link trained down",
        )


def _addresses(up: Sequence[Port]) -> Iterator[Finding]:
    ethernet = [port for port in up if port.ethernet]
    bare = [port.nic for port in ethernet if port.roce_v2_index is None]
    if bare:
        yield warning(
            "network.gid",
            f"no RoCE v2 address over IPv4 on {', '.join(bare)}: RCCL cannot route from there",
            "give its network interface an IPv4 address, and use RoCE v2",
        )
    indices = sorted({port.roce_v2_index for port in ethernet if port.roce_v2_index is not None})
    if len(indices) > 1:
        yield warning(
            "network.gid",
            f"the RoCE v2 address has different indices on this host's NICs: {indices}; NCCL_IB_GID_INDEX "
            "is one for all",
            "leave NCCL_IB_GID_INDEX unset, or make the interfaces alike (one IPv4 address each)",
        )
    elif indices:
        yield ok("network.gid", f"RoCE v2 over IPv4 at index {indices[0]} (the same must hold on every host)")
    small = [
        f"{port.nic} ({port.mtu})" for port in ethernet if port.mtu is not None and port.mtu < _WHOLE_PAGE_MTU
    ]
    if small:
        yield warning(
            "network.mtu",
            f"small frames on {', '.join(small)}",
            "set MTU 9000 there and on the switches between",
        )
