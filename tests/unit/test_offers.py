"""What is said about clouds: each fact with its source, and a page that says the same."""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from pathlib import Path

import pytest

from sky_monarch.gpus import GPUS
from sky_monarch.launch import offers, reference
from sky_monarch.launch.offers import Reachability, known_offers, read_snapshot

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = json.loads(Path(offers.__file__).with_name("offers.json").read_text(encoding="utf-8"))


def test_the_committed_page_is_current():
    committed = (ROOT / "docs/reference/clouds.md").read_text(encoding="utf-8")

    assert committed == reference.clouds_page(), (
        "run: python -m sky_monarch.launch.reference > docs/reference/clouds.md"
    )


def test_each_offer_is_of_a_known_model_and_says_where_it_was_read():
    for cloud in known_offers().clouds.values():
        for offer in cloud.offers:
            assert offer.gpu in GPUS
            assert offer.source.where.startswith("https://")
            assert dt.date.fromisoformat(offer.source.as_of.removeprefix("<= ")) <= dt.date.fromisoformat(
                known_offers().read
            )
            assert offer.spot is not False or offer.usd_spot_per_hour is None, "a price of what is not sold"


def test_what_a_plan_counts_on_has_a_source():
    for cloud in known_offers().clouds.values():
        if cloud.by != "skypilot":
            continue
        for field in ("spot", "multi_node", "reachability"):
            assert cloud.sources.get(field), f"{cloud.name}: where was {field} read?"
            assert all(source.read for source in cloud.sources[field])


def test_what_no_source_says_stays_unknown():
    known = known_offers()

    assert known.clouds["azure"].offers[0].usd_per_hour is None
    assert {cloud.reachability for cloud in known.clouds.values() if not cloud.plannable} == {
        Reachability.UNKNOWN
    }
    assert "unknown" in reference.clouds_page()


def test_no_source_and_no_instance_stands_twice_or_unused():
    used = {entry["source"] for cloud in DOCUMENT["clouds"] for entry in cloud["offers"]}
    for cloud in DOCUMENT["clouds"]:
        for names in cloud["sources"].values():
            used |= {names} if isinstance(names, str) else set(names)
    assert used == set(DOCUMENT["sources"])
    for cloud in known_offers().clouds.values():
        instances = [offer.instance for offer in cloud.offers if offer.instance]
        assert len(instances) == len(set(instances))


def test_a_source_that_is_not_listed_is_refused():
    broken = {**DOCUMENT, "sources": {}}

    with pytest.raises(KeyError):
        read_snapshot(broken)


def test_the_snapshot_is_part_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert "launch/*.json" in project["tool"]["setuptools"]["package-data"]["sky_monarch"]


@pytest.mark.parametrize("name", sorted(GPUS))
def test_each_model_has_a_name_for_each_target(name):
    gpu = GPUS[name]

    assert gpu.label_command("n1") == f"kubectl label node n1 skypilot.co/accelerator={name.lower()}"
    assert gpu.gres == name.lower()
    assert (gpu.rocm is None) == (gpu.rocm_source is None)
