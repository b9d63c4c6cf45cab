"""What the model is to learn: nothing, or what a teacher knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn

from benches.recovery import model as shared

_SEED = 20_261_130
_HELD_OUT = 256
_HIDDEN = 32
# How far into the bend of its tanh the teacher works: with 1 it is all but linear, and learned in seconds.
_GAIN = 2.0


class Task(Protocol):
    """Batches and a loss.

    Attributes:
        loss: Of outputs and targets.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def batch(self, step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of shape ``(32, 64)`` and targets, of this step and rank alone."""

    def held_out(self, model: nn.Module) -> float | None:
        """Loss on samples that nobody trains on; None where that says nothing."""


class Labels:
    """Random labels: nothing to learn, nothing to compute."""

    def __init__(self) -> None:
        self.loss = nn.CrossEntropyLoss()

    def batch(self, step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels."""
        return shared.batch(step, group, rank)

    def held_out(self, model: nn.Module) -> float | None:  # noqa: ARG002
        """Nothing."""
        return None


class Teacher:
    """Regression onto a small fixed network, on inputs that are drawn anew for each step.

    Its loss is the share of the targets' variance that is not explained: 1 for who knows nothing.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._first = torch.randn(64, _HIDDEN, generator=generator) * (_GAIN / 64**0.5)
        self._second = torch.randn(_HIDDEN, 10, generator=generator) / _HIDDEN**0.5
        self._inputs = torch.randn(_HELD_OUT, 64, generator=generator)
        raw = self._teach(self._inputs)
        self._second /= raw.std()
        self._targets = self._teach(self._inputs)
        self.loss = nn.MSELoss()

    def _teach(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs @ self._first) @ self._second

    def batch(self, step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, and what the teacher says to them."""
        inputs, _ = shared.batch(step, group, rank)
        return inputs, self._teach(inputs)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def held_out(self, model: nn.Module) -> float | None:
        """Loss on 256 fixed samples."""
        return float(self.loss(model(self._inputs), self._targets))


TASKS: Mapping[str, Callable[[], Task]] = {"labels": Labels, "teacher": Teacher}
