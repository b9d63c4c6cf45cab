"""One rank of peer ``torchrun``: plain DDP, a checkpoint every 20 steps, everybody restarts on a death.

Out of the box torchrun does not recover on gloo: restarted ranks find stale addresses in the store that outlives
them. So each round gets a store prefix of its own; that is kind to it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benches.recovery import model as shared
from benches.recovery.events import RankLog, log_path

CHECKPOINT_EVERY = 20


def join() -> int:
    """Join the job; returns the rank."""
    server = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    store = dist.PrefixStore("round" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    return rank


def main() -> None:
    """Train until killed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()

    rank = join()
    log = RankLog(log_path(options.folder, rank, 0))
    log.write("main", started=started)
    model, optimizer = shared.build()
    step, checkpoint = 0, options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    loss_of = nn.CrossEntropyLoss()
    recorder = shared.Recorder(log, model, optimizer, options.folder / "stop")
    while True:
        inputs, labels = shared.batch(step, rank, 0)
        shared.compute()
        optimizer.zero_grad()
        loss_of(parallel(inputs), labels).backward()
        optimizer.step()
        step += 1
        recorder.step(step - 1, step)
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            fresh = checkpoint.with_suffix(".new")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh
            )
            fresh.replace(checkpoint)


if __name__ == "__main__":
    main()
