"""What is known of the places that have AMD GPUs: a dated snapshot, each fact with where it was read.

The facts themselves are data, ``offers.json``. What no source says is None there and "unknown" everywhere else:
a plan never counts on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "Cloud",
    "HeadOffer",
    "Offer",
    "Reachability",
    "Snapshot",
    "Source",
    "known_offers",
    "read_snapshot",
]


class Reachability(StrEnum):
    """How hosts of one place reach each other, where each is a cluster of its own."""

    SAME_NETWORK = "same network"
    """Every port of every host, over a private network."""

    PUBLIC_PORTS = "public ports"
    """Only ports that were opened, on public addresses."""

    MAPPED_PORTS = "mapped ports"
    """Only ports that were opened, and those under another number outside than inside."""

    NONE = "none"
    """Outwards only."""

    UNKNOWN = "unknown"
    """No source was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a fact was read.

    Attributes:
        what: What it is and says.
        where: Its address.
        read: The day on which it was read.
        dated: The day of what it says, where that is older.
    """

    what: str
    where: str
    read: str
    dated: str | None = None

    @property
    def as_of(self) -> str:
        """The day for which the fact holds. Where the source bears no date it is that day or an earlier one."""
        return self.dated or f"<= {self.read}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One size of host.

    Attributes:
        gpu: Model.
        count: GPUs of the host; None where no source says.
        instance: The place's own name for it.
        usd_per_hour: Price of the host.
        usd_spot_per_hour: The same as spot.
        spot: Whether it can be had as spot.
        in_catalog: Whether SkyPilot's own catalog has it.
        source: Where this was read.
    """

    gpu: str
    count: int | None
    instance: str | None
    usd_per_hour: float | None
    usd_spot_per_hour: float | None
    spot: bool | None
    in_catalog: bool | None
    source: Source

    def price(self, *, spot: bool) -> float | None:
        """Dollars an hour; None where that is unknown."""
        return self.usd_spot_per_hour if spot else self.usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOffer:
    """What a head that is a cluster of its own runs on: 2 CPUs, 8 GiB, no GPU.

    Attributes:
        instance: The place's own name for it.
        usd_per_hour: Its price, never as spot.
        source: Where this was read.
    """

    instance: str
    usd_per_hour: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """One place.

    Attributes:
        name: First part of ``infra``.
        title: Its name for people.
        by: ``skypilot`` or ``local``, else the infra through which it is reached.
        spot: Whether capacity can be had that may be taken back.
        multi_node: Whether one cluster may have several hosts.
        reachability: How clusters reach each other.
        docker: Whether hosts run a container image.
        network_tier: Whether SkyPilot takes ``network_tier: best`` there.
        autodown: Whether a forgotten cluster ends by itself.
        ports: Whether ports can be opened.
        sources: By field, where it was read.
        offers: Sizes of hosts with AMD GPUs.
        head: The smallest machine that a head fits; None where its price was read nowhere.
        regions: Zones by region; empty where no list was read.
    """

    name: str
    title: str
    by: str
    spot: bool | None
    multi_node: bool | None
    reachability: Reachability
    docker: bool | None
    network_tier: bool | None
    autodown: bool | None
    ports: bool | None
    sources: Mapping[str, tuple[Source, ...]]
    offers: tuple[Offer, ...]
    head: HeadOffer | None = None
    regions: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def plannable(self) -> bool:
        """Whether ``infra`` may name it."""
        return self.by in ("skypilot", "local")

    @property
    def pool(self) -> bool:
        """Whether it has no sizes of its own: a host is whatever its owner has put there."""
        return self.plannable and not self.offers


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is known, as of one day.

    Attributes:
        read: That day.
        clouds: By name.
    """

    read: str
    clouds: Mapping[str, Cloud]

    def sellers(self, gpu: str) -> list[str]:
        """Names of the clouds that ``infra`` may name for this model."""
        return [
            cloud.name
            for cloud in self.clouds.values()
            if cloud.plannable and any(offer.gpu == gpu for offer in cloud.offers)
        ]


def _offers(entry: Mapping[str, Any], sources: Mapping[str, Source]) -> list[Offer]:
    def price(key: str, count: int | None) -> float | None:
        each = entry.get(key)
        return None if each is None or count is None else round(each * count, 4)

    return [
        Offer(
            gpu=entry["gpu"],
            count=count,
            instance=entry["instance"] and entry["instance"].format(count=count),
            usd_per_hour=price("usd_per_gpu_hour", count),
            usd_spot_per_hour=price("usd_spot_per_gpu_hour", count),
            spot=entry["spot"],
            in_catalog=entry["in_catalog"],
            source=sources[entry["source"]],
        )
        for count in entry["counts"]
    ]


def _cloud(entry: Mapping[str, Any], sources: Mapping[str, Source]) -> Cloud:
    given = {
        field: tuple(sources[name] for name in ([names] if isinstance(names, str) else names))
        for field, names in entry["sources"].items()
    }
    head = entry.get("head")
    fields = ("name", "title", "by", "spot", "multi_node", "docker", "network_tier", "autodown", "ports")
    return Cloud(
        **{field: entry[field] for field in fields},
        reachability=Reachability(entry["reachability"]),
        sources=given,
        offers=tuple(offer for part in entry["offers"] for offer in _offers(part, sources)),
        head=None if head is None else HeadOffer(**{**head, "source": sources[head["source"]]}),
        regions={name: frozenset(zones) for name, zones in (entry.get("regions") or {}).items()},
    )


def read_snapshot(document: Mapping[str, Any]) -> Snapshot:
    """A snapshot of the form of ``offers.json``."""
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    clouds = (_cloud(entry, sources) for entry in document["clouds"])
    return Snapshot(read=document["read"], clouds={cloud.name: cloud for cloud in clouds})


@lru_cache(maxsize=1)
def known_offers() -> Snapshot:
    """The snapshot that is part of this version."""
    text = Path(__file__).with_name("offers.json").read_text(encoding="utf-8")
    return read_snapshot(json.loads(text))
