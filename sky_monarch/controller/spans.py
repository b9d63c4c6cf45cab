"""Which part of a wide group, one that has several hosts, each host holds. Pure arithmetic of the placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Place", "homes_of", "places_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One host's part of a replica group.

    Attributes:
        replica: The group.
        node: Which of its hosts this is, from 0.
        nodes: Hosts of the group.
        ranks: Its ranks here.
    """

    replica: int
    node: int
    nodes: int
    ranks: range


def homes_of(hosts: Mapping[str, tuple[int, ...]]) -> dict[int, tuple[str, ...]]:
    """The hosts of each group, in order.

    Raises:
        ValueError: A replica is missing, or a group that has several hosts shares one of them.
    """
    homes: dict[int, tuple[str, ...]] = {}
    for name, replicas in hosts.items():
        for replica in replicas:
            homes[replica] = (*homes.get(replica, ()), name)
    if sorted(homes) != list(range(len(homes))):
        raise ValueError(f"hosts must name each of the replicas 0..{len(homes)} once, got {dict(hosts)}")
    for replica, names in homes.items():
        if len(names) > 1 and any(hosts[name] != (replica,) for name in names):
            raise ValueError(
                f"replica {replica} is named more than once, and shares one of its hosts: {dict(hosts)}"
            )
    return homes


def places_of(hosts: Mapping[str, tuple[int, ...]], *, ranks: int) -> dict[str, Place]:
    """The part that each host has of a wide group; hosts with whole groups are not in it.

    Args:
        hosts: Replicas by host.
        ranks: Ranks of each group.

    Raises:
        ValueError: They do not fit.
    """
    found: dict[str, Place] = {}
    for replica, names in homes_of(hosts).items():
        if len(names) == 1:
            continue
        each, rest = divmod(ranks, len(names))
        if rest or not each:
            raise ValueError(f"{ranks} ranks cannot be shared by the {len(names)} hosts of replica {replica}")
        for node, name in enumerate(names):
            held = range(node * each, (node + 1) * each)
            found[name] = Place(replica=replica, node=node, nodes=len(names), ranks=held)
    return found
