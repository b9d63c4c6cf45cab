"""Processes with an unmodified ``torchft.Manager`` each, forked from one process that has imported torch.

``python -m tests.support.manager_farm FOLDER`` reads a JSON object a line, ``{"replica", "name",
"lighthouse", "quorum_timeout_s", "process_group_timeout_s", "die_in_rendezvous"}``, forks a trainer for
each and answers with its pid. The trainer commits steps until ``FOLDER/stop`` exists; each becomes a JSON
line of ``FOLDER/NAME``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

PR_SET_PDEATHSIG = 1


class FragileGroup(ProcessGroupGloo):
    """TorchFT's own; where ``cue`` exists, its process is killed as it enters a rendezvous."""

    def __init__(self, timeout: timedelta, cue: str) -> None:
        super().__init__(timeout=timeout)
        self._cue = cue

    def configure(self, *args: Any, **kwargs: Any) -> None:
        if self._cue and os.path.exists(self._cue):  # noqa: PTH110 (nothing may take time here)
            os.kill(os.getpid(), signal.SIGKILL)
        super().configure(*args, **kwargs)


def train(folder: Path, order: dict[str, Any]) -> None:
    weights = torch.zeros(8)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        # gloo lets only the neighbours of the dead know: the others stall this long
        pg=FragileGroup(
            timedelta(seconds=order.get("process_group_timeout_s", 10.0)),
            order.get("die_in_rendezvous", False),
        ),
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights.clone()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        replica_id=f"rep_{order['replica']}",
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=order["lighthouse"],
        hostname="127.0.0.1",
        init_sync=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=order["quorum_timeout_s"]),
        connect_timeout=timedelta(seconds=10),
    )
    with (folder / order["name"]).open("a", buffering=1) as log:
        while not (folder / "stop").exists():
            time.sleep(0.03)
            manager.start_quorum()
            # differs between replicas: the weights agree only if the averages did
            gradient = torch.full((8,), 1.0 + manager.current_step() % 7 + order["replica"] / 3)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
                line = {
                    "step": manager.current_step(),
                    "participants": manager.num_participants(),
                    "weights": weights.tolist(),
                    "at": time.monotonic(),
                }
                log.write(json.dumps(line) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the trainers: leave no zombies
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            code = 0
            try:
                train(folder, order)
            except BaseException:  # noqa: BLE001 (the fork must not run on in its parent's loop)
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            # not sys.exit: threads of torch and torchft outlive the interpreter's wish to end
            os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
