"""torch's DataLoader in step with the session: batches are fetched ahead, and again where a guess was wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from sky_monarch.training.sampler import Sampler

__all__ = ["Loader"]


class Loader:
    """Fetches and collates the batch of each step, in worker processes if asked to.

    Which batch is next is known only when the step before is committed. The workers fetch what it will be
    if no group comes or goes; where one does, what they have fetched is dropped and fetching begins anew.

    Args:
        dataset: Map-style: ``dataset[index]``.
        sampler: The session's.
        options: DataLoader's own: ``num_workers``, ``collate_fn``, ``pin_memory``, ``prefetch_factor``, …
    """

    def __init__(self, dataset: Dataset[Any], sampler: Sampler, **options: Any) -> None:
        self._sampler = sampler
        self._ahead = _Ahead(sampler)
        options.setdefault("persistent_workers", options.get("num_workers", 0) > 0)
        self._loader = DataLoader(dataset, batch_sampler=self._ahead, **options)
        self._fetching: Iterator[Any] | None = None
        self._number, self._batch = -1, None

    def batch(self) -> Any:
        """The collated samples of this rank in this step; the same object until the step is committed."""
        wanted = self._sampler.batch_number
        if wanted != self._number:
            if self._fetching is None or not self._ahead.fetched or self._ahead.fetched[0] != wanted:
                self._ahead.fetched.clear()
                self._fetching = iter(self._loader)
            self._batch = next(self._fetching)
            self._number = self._ahead.fetched.popleft()
        return self._batch


class _Ahead:
    """The batches that this rank will have if nobody comes or goes: without end, from the present one on."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.fetched: deque[int] = deque()  # as long as DataLoader fetches ahead

    def __iter__(self) -> Iterator[list[int]]:
        number = self._sampler.batch_number
        step_size = self._sampler.number_ahead(1) - number
        while True:
            self.fetched.append(number)
            yield self._sampler.indices_of(number).tolist()
            number += step_size
