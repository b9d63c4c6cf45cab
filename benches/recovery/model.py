"""What every peer trains: 0.6 M parameters, 7 MB with AdamW's state, 30 ms of pretended computing a step."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benches.recovery.events import RankLog

COMPUTE_S = 0.03
CRC_EVERY = 10
EVALUATE_EVERY = 50
_STOP_EVERY = 5
_CHUNK_BYTES = 16 * 1024 * 1024


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same on every rank, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 512
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 10),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of shape ``(32, 64)`` and labels of shape ``(32,)``, of this step and rank alone."""
    generator = torch.Generator().manual_seed(step * 1000 + group * 10 + rank)
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def compute() -> None:
    """Take the time that a real model would."""
    time.sleep(COMPUTE_S)


def extra_state(gib: float) -> list[torch.Tensor]:
    """State that has to heal and that nothing else touches, in tensors of 16 MiB; written, so really there."""
    chunks = round(gib * 1024**3 / _CHUNK_BYTES)
    return [torch.full((_CHUNK_BYTES // 4,), float(index)) for index in range(chunks)]


class Recorder:
    """Logs a rank's steps, a checksum every ten, and from the stop step on a digest of everything.

    Args:
        log: Of this rank.
        model: With ``optimizer`` what is compared.
        stop_file: Once it exists it holds the step from which on digests are logged.
        held_out: Says how good the model is, at each fiftieth step; None: nobody asks.
    """

    def __init__(
        self,
        log: RankLog,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stop_file: Path,
        held_out: Callable[[nn.Module], float | None] | None = None,
    ) -> None:
        self._log, self._model, self._optimizer, self._stop_file = log, model, optimizer, stop_file
        self._held_out = held_out
        self._stop: int | None = None
        self._count = 0

    def step(self, before: int, after: int) -> None:
        """Log one attempt at a step, which committed where ``after`` is more than ``before``."""
        found: dict[str, Any] = {}
        if after > before and after % CRC_EVERY == 0:
            found["crc"] = self._crc()
        if self._held_out is not None and after > before and after % EVALUATE_EVERY == 0:
            found["held_out"] = self._held_out(self._model)
        self._log.step(before, after, **found)
        if self._stop is None and self._count % _STOP_EVERY == 0 and self._stop_file.exists():
            self._stop = int(self._stop_file.read_text())
        if self._stop is not None and after > before and after >= self._stop:
            self._log.write("final", step=after, sha=self._sha())
        self._count += 1

    def _crc(self) -> int:
        crc = 0
        for parameter in self._model.parameters():
            crc = zlib.crc32(parameter.detach().numpy(), crc)
        return crc

    def _sha(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        for state in self._optimizer.state_dict()["state"].values():
            for key in sorted(state):
                digest.update(state[key].detach().numpy().tobytes())
        return digest.hexdigest()
