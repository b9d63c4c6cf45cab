"""What the forked ranks of the training tests run. Each writes JSON lines to a file of its own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def journal(path: str) -> Callable[..., None]:
    def write(event: str, **fields: Any) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")

    return write


def lighthouse(path: str, min_replicas: int, join_timeout_ms: int, heartbeat_timeout_ms: int) -> None:
    """TorchFT's lighthouse; its address goes to ``path``."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    partial = Path(f"{path}.partial")
    partial.write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    partial.rename(path)
    signal.pause()


def rank(log: str, options: dict[str, Any]) -> None:
    """Train a small model in a session.

    Options: ``steps``; ``seed`` of the initial parameters; ``die_at``: SIGKILL itself in the middle of the
    collectives of that step; ``sleep_s`` a step; ``average_first``: with a call of its own; ``uneven``: rank ``k`` has
    ``k + 1`` samples, each with a gradient of ``k + 1``; ``start``: the file before which nobody takes a step;
    ``ease``: the step from which on each takes a quarter of a second, until that file is there; ``linger_s``: how long
    it stays for others once it is done.
    """
    import torch
    from torch import nn

    import sky_monarch.training.session
    from sky_monarch.training import Session, Timeouts, seed_everything

    write = journal(log)
    if "linger_s" in options:
        sky_monarch.training.session._LINGER_ALONE_S = options["linger_s"]
    since, until = options.get("ease", (0, None))
    torch.set_num_threads(1)
    seed_everything(options.get("seed", 0))
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))})
    model.register_parameter("ones", nn.Parameter(torch.zeros(3)))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra = {"value": 0}

    def before_update(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        write(
            "update",
            step=step,
            ones=model.get_parameter("ones").grad.tolist(),
            unused=model.get_parameter("unused").grad.tolist(),
            lr=optimizer.param_groups[0]["lr"],
        )

    session = Session(
        model,
        optimizer,
        target_step=options["steps"],
        seed=options.get("seed", 0),
        before_update=before_update,
        bucket_bytes=1024,
        timeouts=Timeouts(collective_s=60, transfer_s=30, quorum_s=120, heartbeat_s=2, join_s=20),
    )
    session.register_state("extra", lambda state: extra.update(state), lambda: dict(extra))
    with session:
        write("entered", pid=os.getpid())
        if "die_at" in options:
            die_in_collective(session, options["die_at"])
        while "start" in options and not Path(options["start"]).exists():
            time.sleep(0.01)
        while session.running:
            step = session.step
            x = torch.randn(8, 16, generator=session.generator())
            eases = until is not None and step >= since and not Path(until).exists()
            time.sleep(0.25 if eases else options.get("sleep_s", 0.0))
            samples = session.rank + 1 if options.get("uneven") else None
            loss = model["net"](x).square().mean() + model.get_parameter("ones").sum() * (samples or 1)
            loss.backward()
            if options.get("average_first") and session.average_gradients(samples=samples):
                write("averaged", step=step, ones=model.get_parameter("ones").grad.tolist())
            if session.step_optimizer(metrics={"loss": loss.detach()}, samples=samples):
                extra["value"] = session.step
                write(
                    "commit",
                    step=session.step,
                    digest=session.digest(),
                    participants=session._manager.num_participants(),
                    leader=session.is_leader,
                )
        write(
            "finished",
            step=session.step,
            digest=session.digest(),
            extra=extra["value"],
            leader=session.is_leader,
        )
    write("left")


def die_in_collective(session: Any, step: int) -> None:
    """SIGKILL this process right after it has begun its second bucket of ``step``."""
    begun = [0]
    allreduce = session._group.allreduce

    def dying(tensors: Any, options: Any) -> Any:
        work = allreduce(tensors, options)
        begun[0] += session.step == step
        if begun[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    session._group.allreduce = dying


def mesh_member(log: str, folder: str, number: int, cascade: bool) -> None:
    """One of four members of a gloo mesh whose others die, hang, and stay away.

    ``cascade`` false leaves the cut out (the mutant), and ends after the first death.
    """
    import torch
    from torch import distributed as dist

    from sky_monarch.training.process_group import ResilientGloo

    write = journal(log)
    torch.set_num_threads(1)
    store_file = Path(folder) / "store"
    if number == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        partial = Path(folder) / "store.partial"
        partial.write_text(f"127.0.0.1:{store.port}")
        partial.rename(store_file)
    while not store_file.exists():
        time.sleep(0.01)
    address = store_file.read_text()
    timeout_s = 30 if cascade else 10
    group = ResilientGloo(timeout=timedelta(seconds=timeout_s), connect_timeout=timedelta(seconds=timeout_s))
    if not cascade:
        group._cut = lambda mesh, why: None

    def join(quorum_id: int, world_size: int) -> None:
        group.configure(f"{address}/q{quorum_id}", "member", number, world_size, quorum_id)

    def reduce() -> str:
        try:
            group.allreduce([torch.ones(300_000)], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            return str(error)[:80]
        return "ok"

    join(1, 4)
    write("reduced", phase="whole", result=reduce())
    if number == 3:
        write("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    write("reduced", phase="killed", result=reduce(), took_s=time.monotonic() - started)
    if not cascade:
        time.sleep(timeout_s + 1)  # as a rank that goes on: its sockets stay open
        return

    join(2, 3)
    if number == 2:
        write("hangs")
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(1.0, group.declare_dead, [2]).start()
    started = time.monotonic()
    write("reduced", phase="hung", result=reduce(), took_s=time.monotonic() - started)

    # The third member never comes to this rendezvous, and its death is told.
    threading.Timer(0.5, group.declare_dead, [3]).start()
    started = time.monotonic()
    try:
        join(3, 3)
        result = "ok"
    except RuntimeError as error:
        result = str(error)
    write("rendezvous", result=result, took_s=time.monotonic() - started)

    join(4, 2)
    group.declare_dead(3)  # late news of an older quorum
    write("reduced", phase="after", result=reduce())
    os._exit(0)  # the abandoned rendezvous thread is still inside gloo
