"""Equal random numbers where replicas must agree, different ones where they must not."""

from __future__ import annotations

import contextlib
import random

import torch

__all__ = ["batch_generator", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    Call it before the model is built, with one seed for all replicas.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)


def batch_generator(seed: int, *, step: int, replica: int, rank: int, stream: int = 0) -> torch.Generator:
    """A generator that depends on these numbers and nothing else."""
    place = ((step * 65_537 + replica) * 4_099 + rank) * 31 + stream
    return torch.Generator().manual_seed((seed * 1_000_000_007 + place) % 2**63)
