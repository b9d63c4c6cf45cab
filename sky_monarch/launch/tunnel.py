"""Hosts without a common network: how they are told apart in the tunnel through the head. Pure.

The other side of this is ``rust_core/src/tunnel.rs``; an agent refuses to start at another address than this one.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from sky_monarch.errors import ConfigError
from sky_monarch.launch.offers import Reachability

if TYPE_CHECKING:
    from sky_monarch.launch.cluster_plan import Choice

__all__ = ["HEAD_ADDRESS", "is_tunnelled", "tunnel_address"]

HEAD_ADDRESS = "127.64.0.1"
"""Where the head serves the rendezvous stores of quorums: on loopback, which hosts reach through the tunnel alone."""

_MOST_HOSTS = (1 << 22) - 2
_TOGETHER = (str(Reachability.SAME_NETWORK), "one host")


def is_tunnelled(choice: Choice) -> bool:
    """Whether the hosts of a choice reach each other through the head alone."""
    return len(choice.hosts) > 1 and choice.reachability not in _TOGETHER


def tunnel_address(host: str) -> str:
    """The address of a host's ranks, on all hosts of the run.

    Raises:
        ConfigError: Its name ends in no ``-h<number>``.

    >>> tunnel_address("demo-h0"), tunnel_address("demo-h300")
    ('127.64.0.2', '127.64.1.46')
    """
    found = re.search(r"-h(0|[1-9][0-9]{0,6})\Z", host, re.ASCII)
    if found is None or int(found[1]) >= _MOST_HOSTS:
        raise ConfigError(f"host {host} has no place in the tunnel: names end in -h<number> there")
    return str(ipaddress.IPv4Address(HEAD_ADDRESS) + 1 + int(found[1]))
