"""The guide for Monarch's users names what there is, and what there is not."""

from __future__ import annotations

import re
from pathlib import Path

import sky_monarch.actor
from sky_monarch.actor import Accumulator, Actor, Channel, Future, HostMesh, Port, PortReceiver, ProcMesh
from sky_monarch.actors.endpoint import Endpoint
from sky_monarch.actors.shape import Shaped

GUIDE = Path(__file__).parents[2] / "docs/guides/from-monarch.md"
#: Where the names of a row are found that are no names of the module.
HOMES = (
    sky_monarch.actor,
    Accumulator,
    Actor,
    Channel,
    Endpoint,
    Future,
    HostMesh,
    Port,
    PortReceiver,
    ProcMesh,
    Shaped,
)


def names(section: str) -> set[str]:
    """The names in the first column of a section's table, without what they belong to and are called with."""
    text = GUIDE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    quoted = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    return {re.sub(r"\(.*|^@", "", word).rpartition(".")[2] for word in quoted}


def test_each_name_that_stays_the_same_is_there() -> None:
    same = names("Names") - {"await", "__cleanup__", "__supervise__"}
    assert len(same) > 25
    assert {name for name in same if not any(hasattr(home, name) for home in HOMES)} == set()


def test_no_name_that_is_missing_is_there() -> None:
    missing = names("What there is not") - {"endpoint", "spawn_procs"}
    assert len(missing) > 10
    assert {name for name in missing if any(hasattr(home, name) for home in HOMES)} == set()
