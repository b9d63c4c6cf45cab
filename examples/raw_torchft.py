"""A plain TorchFT program: nothing of sky-monarch is imported, and it runs under it unchanged.

``sky-monarch up`` gives every process what TorchFT and torch-elastic would: the lighthouse
(``TORCHFT_LIGHTHOUSE``), the group's store (``MASTER_ADDR``, ``MASTER_PORT``), ``RANK``, ``WORLD_SIZE`` and
``REPLICA_GROUP_ID``. By hand, with ``torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510``:

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/raw_torchft.py
"""

import argparse
import os
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--step-s", type=float, default=0.05, help="time that a step takes at least")
arguments = parser.parse_args()

replica = int(os.environ.get("REPLICA_GROUP_ID", "0"))
torch.set_num_threads(1)
if "MASTER_PORT" not in os.environ:  # started by hand: nobody serves a store
    own_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(own_store.port))

torch.manual_seed(0)  # all replicas start equal, so the first step needs no copying
model = torch.nn.Linear(8, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.05)

manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
    state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
    min_replica_size=1,
    replica_id=f"rep_{replica}",
    rank=int(os.environ.get("RANK", "0")),
    world_size=int(os.environ.get("WORLD_SIZE", "1")),
    hostname="127.0.0.1",
    init_sync=False,
    quorum_retries=20,  # a restart of the lighthouse is survived
)
optimizer = Optimizer(manager, sgd)

target = torch.arange(8.0)
while manager.current_step() < arguments.steps:
    generator = torch.Generator().manual_seed(manager.current_step() * 1000 + replica)
    inputs = torch.randn(32, 8, generator=generator)
    optimizer.zero_grad()  # asks for the quorum of this step
    loss = (model(inputs).squeeze(1) - inputs @ target).square().mean()
    loss.backward()
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    optimizer.step()  # only if all replicas of the quorum succeeded
    time.sleep(arguments.step_s)
    if manager.current_step() % 10 == 0:
        print(
            f"step {manager.current_step()} loss {loss.item():.4f} replicas {manager.num_participants()}",
            flush=True,
        )

print(
    f"replica {replica} finished, weights {[round(weight, 3) for weight in model.weight.flatten().tolist()]}"
)
time.sleep(1)  # others may still be reading the last step's state
os._exit(0)  # TorchFT's threads may wait for a quorum that nobody needs any more
