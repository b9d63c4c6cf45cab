"""What of the samples of a step is told."""

from __future__ import annotations

import logging

import pytest
import torch

from sky_monarch.training.contributions import Contributions
from sky_monarch.training.environment import RankEnvironment

PLACE = RankEnvironment(rank=0, world_size=1, store=("127.0.0.1", 1), replica=0, replicas=3)


def test_the_effective_batch_is_logged_at_each_world_size_and_not_at_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sky_monarch.training.contributions")
    counts = Contributions(PLACE, torch.device("cpu"), None, seed=0)
    # The last change: a script that keeps its global batch, whoever takes part.
    history = ([4, 4, 4], [0, 1, 2]), ([4, 4, 4], [0, 1, 2]), ([4, 4, 0], [0, 1]), ([8, 0, 0], [0])
    told = []
    for step, (samples, members) in enumerate(history):
        counts.offer(samples[0])
        counts.by_replica = dict(enumerate(samples))
        told.append(counts.committed(step, members))
    assert [metrics["effective_batch"] for metrics in told] == [12.0, 12.0, 8.0, 8.0]
    assert [record.getMessage() for record in caplog.records] == [
        "step 0: the effective batch is 12, of 3 groups",
        "step 2: the effective batch is 8, of 2 groups",
        "step 3: the effective batch is 8, of 1 groups",
    ]
