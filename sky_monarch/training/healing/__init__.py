"""How a group that heals gets its state: tensors straight into place, from several donors at once."""

from __future__ import annotations

from sky_monarch.training.healing.arrival import Following
from sky_monarch.training.healing.encoding import Replicated
from sky_monarch.training.healing.striped import Source, StripedTransport

__all__ = ["Following", "Replicated", "Source", "StripedTransport"]
