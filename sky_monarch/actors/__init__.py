"""Channels between the processes of a run: thin faces over the Rust core.

Nothing here imports ``sky_monarch._core`` before an object is made, so the package imports where it is
absent.
"""

from __future__ import annotations

from sky_monarch.actors.agent_client import AgentClient
from sky_monarch.actors.authority import Authority
from sky_monarch.actors.channel_client import ChannelClient
from sky_monarch.actors.channel_server import ChannelServer
from sky_monarch.actors.lighthouse_client import LighthouseClient
from sky_monarch.actors.lighthouse_control import LighthouseControl
from sky_monarch.actors.rdma import Domain, RDMABuffer

__all__ = [
    "AgentClient",
    "Authority",
    "ChannelClient",
    "ChannelServer",
    "Domain",
    "LighthouseClient",
    "LighthouseControl",
    "RDMABuffer",
]
