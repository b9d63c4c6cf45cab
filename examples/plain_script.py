"""A plain torch.distributed script that knows nothing of sky-monarch: a torchrun program runs unchanged.

Under ``ranks_per_replica: 2`` each replica group is one such job of two ranks; a death restarts only its own.
By hand: ``torchrun --nproc-per-node 2 examples/plain_script.py``.
"""

import argparse
import time

import torch
from torch import distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--round-s", type=float, default=0.05, help="time that a round takes at least")
arguments = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment
rank, world_size = dist.get_rank(), dist.get_world_size()

for round_ in range(arguments.rounds):
    value = torch.tensor([float(rank + round_)])
    dist.all_reduce(value)
    expected = sum(range(world_size)) + round_ * world_size
    if value.item() != expected:
        raise SystemExit(f"rank {rank}: round {round_} gave {value.item()}, not {expected}")
    time.sleep(arguments.round_s)

print(f"rank {rank} of {world_size}: {arguments.rounds} rounds, all sums right", flush=True)
dist.destroy_process_group()
