"""The order of the samples of an epoch, computed for any place in it: nothing is stored, nothing is drawn.

``torch.randperm`` of a billion samples takes 8 GB and half a minute, on every rank and again after every
restart. Here a Feistel network permutes the smallest power of four that holds the dataset, and what falls
outside the dataset is permuted again until it falls inside ("cycle walking").
"""

from __future__ import annotations

import torch

__all__ = ["permuted"]

# Four suffice for a permutation that looks random to who does not attack it (Luby and Rackoff); small
# datasets have short halves, and want more.
_ROUNDS = 8
_WORD = (1 << 64) - 1


def permuted(places: torch.Tensor, size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Which sample has each place in the order of an epoch.

    Args:
        places: Int64, each in ``0..size``.
        size: Samples of the dataset.
        seed: Of the run.
        epoch: Each has an order of its own.

    Returns:
        Int64 of the same shape: a permutation of ``0..size``, evaluated at ``places``.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    found = _network(places, half, keys)
    while bool((outside := found >= size).any()):
        found[outside] = _network(found[outside], half, keys)
    return found


def _network(places: torch.Tensor, half: int, keys: list[tuple[int, int]]) -> torch.Tensor:
    mask = (1 << half) - 1
    left, right = places >> half, places & mask
    for factor, term in keys:
        # Multiply-shift hashing: the top bits. Int64 wraps around; its shift copies the sign, hence the mask.
        left, right = right, left ^ ((right * factor + term >> 64 - half) & mask)
    return (left << half) | right


def _keys(seed: int, epoch: int) -> list[tuple[int, int]]:
    """For each round an odd factor and a term, by splitmix64."""
    state = (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1342543DE82EF95) & _WORD
    words = []
    for _ in range(2 * _ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        words.append(_signed(word ^ (word >> 31)))
    return [(factor | 1, term) for factor, term in zip(words[::2], words[1::2], strict=True)]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
