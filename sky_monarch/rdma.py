"""Memory that other processes of a run read and write directly.

``RDMABuffer(tensor)`` here; pickled and sent to another process, ``buffer.read_into(tensor)`` there.
"""

from __future__ import annotations

from sky_monarch.actors.rdma import Domain, RDMABuffer, Transfer

__all__ = ["Domain", "RDMABuffer", "Transfer"]
