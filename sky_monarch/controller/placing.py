"""Which replica groups live on which host, once a run was scaled or its job moved.

It lies in the folder of the run as well, for a controller that has lost the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from sky_monarch.controller.phases import HostPhase
from sky_monarch.launch.folder import write_json

if TYPE_CHECKING:
    from sky_monarch.controller.model import State
    from sky_monarch.controller.settings import Settings

__all__ = ["groups_added", "hosts_of", "places_anew", "places_of", "read_scale", "write_scale"]

_log = structlog.get_logger()
_NAME = "scale.json"


def groups_added(row: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Groups that a row of the journal adds to the run, by host."""
    match row["event"]:
        case "scaled":
            homes: Mapping[str, Sequence[int]] = row["homes"]
        case "journal_lost" | "head_replaced" if row.get("scaled"):
            homes = row["scaled"]["homes"]
        case _:
            homes = {}
    return homes


def places_anew(row: Mapping[str, Any]) -> bool:
    """Whether a row of the journal says where groups are from now on."""
    return bool(groups_added(row)) or row["event"] in ("scaled", "job_placed") or bool(row.get("placed"))


def hosts_of(state: State) -> dict[str, tuple[int, ...]]:
    """All groups that there ever were, by host."""
    return {host.name: host.replicas for host in state.hosts}


def places_of(hosts: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """How many groups of its host stand before each."""
    return {replica: place for replicas in hosts.values() for place, replica in enumerate(replicas)}


def write_scale(settings: Settings, state: State) -> None:
    """Note in the run folder what the journal has, and name all hosts there that may bill.

    Where the disk takes nothing the journal has it alone.
    """
    began = {replica for replicas in settings.hosts.values() for replica in replicas}
    added = {name: [one for one in mine if one not in began] for name, mine in hosts_of(state).items()}
    homes = {name: mine for name, mine in added.items() if mine}
    path = settings.run_dir / "run.json"
    try:
        moved = {"choice": state.placement, "homes": _provisioned(state)} if state.placement else None
        write_json(settings.run_dir / _NAME, {"replicas": state.replicas, "homes": homes, "placed": moved})
        if state.provisions:
            hosts = list(_provisioned(state))
            known = json.loads(path.read_bytes())
            if known.get("hosts") != hosts:
                write_json(path, {**known, "hosts": hosts})
    except (OSError, ValueError) as error:
        _log.warning("the run folder does not have the new number of groups", error=str(error))


def _provisioned(state: State) -> dict[str, tuple[int, ...]]:
    """Hosts that may bill, and their groups: not those that the place of the job never needed."""
    return {
        host.name: host.replicas
        for host in state.hosts
        if host.provisioned and not (host.phase is HostPhase.DOWN and not host.replicas and not state.settled)
    }


def read_scale(run_dir: Path) -> dict[str, Any] | None:
    """What :func:`write_scale` has noted; None where the run was never scaled, or nobody can tell."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        known = json.loads((run_dir / _NAME).read_bytes())
        homes = {str(name): [int(one) for one in mine] for name, mine in known["homes"].items()}
        placed = known.get("placed")
        if placed is not None:
            found = {str(name): [int(one) for one in mine] for name, mine in placed["homes"].items()}
            placed = {"choice": int(placed["choice"]), "homes": found}
        return {"replicas": int(known["replicas"]), "homes": homes, "placed": placed}
    return None
