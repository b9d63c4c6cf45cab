"""How long training stands still for a durable checkpoint, against plain ``torch.save`` of the same state.

Both are done in turn, in one process, of the same state: ``torch.save`` to a file with an fsync, and ours, of
which training waits for the snapshot only. The time until ours is complete on the disk is told as well.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from benches.report import emit, emit_distribution

MIB = 256
ROUNDS = 9


def run() -> int:
    import torch

    from sky_monarch.training.checkpoint.plan import CheckpointPlan
    from sky_monarch.training.checkpoint.saving import Checkpoints

    floats = MIB * (1 << 20) // 4 // 3  # parameters, and Adam's two moments
    weights = {f"layer{i}": torch.randn(floats // 16) for i in range(16)}
    moments = {
        i: {"exp_avg": torch.randn(floats // 16), "exp_avg_sq": torch.rand(floats // 16)} for i in range(16)
    }
    state = {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}
    load = f"{MIB} MiB of CPU tensors, {torch.get_num_threads()} threads"
    plain, stalls, complete = [], [], []
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-") as folder:
        saver = Checkpoints(CheckpointPlan(folder=Path(folder, "ours"), every_steps=1, keep=1))
        for step in range(1, ROUNDS + 2):
            started = time.perf_counter()
            with Path(folder, "plain.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            plain.append(time.perf_counter() - started)
            started = time.perf_counter()
            saver.save(step, state)
            stalls.append(time.perf_counter() - started)
            if not saver.flush(120):
                return 1
            complete.append(time.perf_counter() - started)
        if saver.news().get("checkpoint_step") != ROUNDS + 1:
            return 1
    emit("sky-monarch", "first_save_stall_s", stalls[0], "s", load=load)  # its buffers are new
    emit_distribution("sky-monarch", "save_stall_s", stalls[1:], "s", load=load)
    emit_distribution("sky-monarch", "save_complete_s", complete[1:], "s", load=load)
    emit_distribution("torch.save", "save_stall_s", plain[1:], "s", load=load)
    ratios = [ours / theirs for ours, theirs in zip(stalls[1:], plain[1:], strict=True)]
    emit("sky-monarch / torch.save", "save_stall_ratio_p50", statistics.median(ratios), "ratio", load=load)
    return 0
