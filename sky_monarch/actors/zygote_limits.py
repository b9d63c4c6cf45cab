"""Bounds that both ends of the line to a zygote keep."""

from __future__ import annotations

__all__ = ["MOST_BYTES", "MOST_FDS"]

#: Of one message.
MOST_BYTES = 128 * 1024
#: Descriptors with one message.
MOST_FDS = 64
