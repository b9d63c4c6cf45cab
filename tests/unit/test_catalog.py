"""Regions and zones of ``infra``: by our own list, and by the catalog of a SkyPilot on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sky_monarch.launch.catalog import unknown_place
from sky_monarch.launch.offers import known_offers

CLOUDS = known_offers().clouds


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def catalog(home: Path, version: int, cloud: str, *places: tuple[str, str]) -> None:
    file = home / f".sky/catalogs/v{version}/{cloud}/vms.csv"
    file.parent.mkdir(parents=True)
    rows = [f"x,{region},{zone}" for region, zone in places]
    file.write_text("\n".join(["InstanceType,Region,AvailabilityZone", *rows]) + "\n")


@pytest.mark.parametrize(
    "infra",
    [
        "runpod",
        "runpod/US",
        "runpod/US/US-KS-2",
        "runpod/*/US-KS-2",
        "k8s/any/thing",
        "slurm/alps/gpu",
        "local",
    ],
)
def test_what_is_known_or_has_no_regions_is_taken(infra: str, home: Path) -> None:
    assert unknown_place(infra, CLOUDS[infra.partition("/")[0]]) is None


def test_where_nobody_has_a_list_any_region_is_taken(home: Path) -> None:
    assert unknown_place("oci/us-sanjose-1", CLOUDS["oci"]) is None
    assert unknown_place("azure/mars", CLOUDS["azure"]) is None


def test_skypilots_newest_catalog_here_knows_more_than_our_list(home: Path) -> None:
    assert unknown_place("runpod/XX", CLOUDS["runpod"]) is not None
    catalog(home, 9, "runpod", ("US", "US-KS-2"), ("XX", ""))
    catalog(home, 8, "runpod", ("US", "US-KS-2"))
    catalog(home, 8, "azure", ("eastus", "1"), ("westus3", "2"))

    assert unknown_place("runpod/XX", CLOUDS["runpod"]) is None
    assert unknown_place("azure/eastus/1", CLOUDS["azure"]) is None
    reason, fix = unknown_place("azure/eastsu", CLOUDS["azure"]) or ("", "")
    assert reason == "no region eastsu is known there"
    assert fix == "did you mean azure/eastus? known are eastus, westus3"
    reason, fix = unknown_place("azure/eastus/7", CLOUDS["azure"]) or ("", "")
    assert reason == "no zone 7 is known there"


def test_a_catalog_that_cannot_be_read_is_none(home: Path) -> None:
    catalog(home, 8, "azure", ("eastus", "1"))
    (home / ".sky/catalogs/v8/azure/vms.csv").write_bytes(b"\xff\xfe\x00")
    (home / ".sky/catalogs/vx/azure").mkdir(parents=True)
    (home / ".sky/catalogs/vx/azure/vms.csv").write_text("Region\nmoon\n")

    assert unknown_place("azure/mars", CLOUDS["azure"]) is None
