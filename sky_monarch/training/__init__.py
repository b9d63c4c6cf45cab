"""Fault-tolerant training: what a recipe imports.

    from sky_monarch.training import Session, seed_everything

Nothing is imported until it is asked for: the store helper lives in this package too and must not pay for
TorchFT.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = [
    "GradientBuckets",
    "Loader",
    "ResilientGloo",
    "Sampler",
    "Session",
    "Timeouts",
    "inner_mesh",
    "seed_everything",
]

if TYPE_CHECKING:
    from sky_monarch.training.collectives import GradientBuckets
    from sky_monarch.training.loader import Loader
    from sky_monarch.training.membership import inner_mesh
    from sky_monarch.training.process_group import ResilientGloo
    from sky_monarch.training.sampler import Sampler
    from sky_monarch.training.seeding import seed_everything
    from sky_monarch.training.session import Session
    from sky_monarch.training.timeouts import Timeouts

# TorchFT's Rust half reads this once, at import; its INFO lines show the lighthouse's URL with its secret.
os.environ.setdefault("RUST_LOG", "error")

_HOME = {
    "GradientBuckets": "collectives",
    "Loader": "loader",
    "ResilientGloo": "process_group",
    "Sampler": "sampler",
    "Session": "session",
    "Timeouts": "timeouts",
    "inner_mesh": "membership",
    "seed_everything": "seeding",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
