"""Forks ranks of peer ``torchft-tuned`` that need no imports any more: the fastest restart it could have.

Reads one JSON line a rank, ``{"argv": […], "output": path}``, and answers with the pid. Forking is safe here: this
process never starts a thread.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

import torch

from benches.recovery import train_torchft


def main() -> None:
    """Serve until the end of stdin."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros(1)
    optimizer.zero_grad()
    optimizer.step()  # whatever the first step of an optimizer loads is there as well
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the ranks
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(order["argv"], order["output"])
        print(pid, flush=True)


def _child(argv: list[str], output: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        train_torchft.main(argv)
    except BaseException:  # noqa: BLE001  # its last words
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
