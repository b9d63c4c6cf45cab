"""Regions and zones that are known of a cloud: those of our snapshot, and those of SkyPilot's catalog on this machine.

SkyPilot keeps the catalogs of clouds as files, and takes no region that is in none of them. Ours may be older than they
are; where SkyPilot has never run, ours is all that there is.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from pathlib import Path

from sky_monarch.launch.offers import Cloud

__all__ = ["unknown_place"]

_CATALOGS = "~/.sky/catalogs"
_MOST_BYTES = 64 << 20
_SHOWN = 12
_ANY = "*"

#: Zones by region; a region with none has none, or none that are known.
Regions = Mapping[str, frozenset[str]]


def unknown_place(infra: str, cloud: Cloud) -> tuple[str, str] | None:
    """``(reason, fix)`` where a place names a region or a zone that is not known; None where nothing is against it.

    Args:
        infra: The place.
        cloud: What it names first.
    """
    _, *parts = infra.split("/")
    if not parts or cloud.pool or cloud.by == "local":
        return None
    region, zone = parts[0], parts[1] if len(parts) > 1 else _ANY
    if cloud.regions and _is_known(cloud.regions, region, zone):
        return None
    known = _of_skypilot(cloud.name) or cloud.regions
    if not known or _is_known(known, region, zone):
        return None
    if region in known or region == _ANY:
        return _refusal(
            f"no zone {zone} is known there", f"{cloud.name}/{region}", zone, _zones(known, region)
        )
    if (home := next((name for name, zones in known.items() if region in zones), None)) is not None:
        return f"{region} is a zone, not a region", f"write {cloud.name}/{home}/{region}"
    return _refusal(f"no region {region} is known there", cloud.name, region, sorted(known))


def _zones(known: Regions, region: str) -> list[str]:
    found = known.values() if region == _ANY else (known[region],)
    return sorted(zone for zones in found for zone in zones)


def _is_known(known: Regions, region: str, zone: str) -> bool:
    if region not in (_ANY, *known):
        return False
    zones = _zones(known, region)
    return zone == _ANY or zone in zones or not zones


def _refusal(reason: str, stem: str, name: str, known: list[str]) -> tuple[str, str]:
    by_key = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_key, 1, 0.6)
    listed = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
    if near:
        return reason, f"did you mean {stem}/{by_key[near[0]]}? known are {listed}"
    return reason, f"known are {listed}; {stem} alone leaves the choice open"


def _of_skypilot(cloud: str) -> Regions | None:
    """What SkyPilot's newest catalog on this machine has; None where there is none, or it cannot be read."""
    files = Path(_CATALOGS).expanduser().glob(f"v[0-9]*/{cloud}/vms.csv")
    try:
        newest = max(files, key=lambda path: int(path.parts[-3][1:]), default=None)
        if newest is None or newest.stat().st_size > _MOST_BYTES:
            return None
        found: dict[str, set[str]] = {}
        with newest.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if region := row.get("Region"):
                    zones = found.setdefault(region, set())
                    zones.update(filter(None, (row.get("AvailabilityZone"),)))
    except (OSError, ValueError, csv.Error):
        return None
    return {region: frozenset(zones) for region, zones in found.items()} or None
