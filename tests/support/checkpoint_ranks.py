"""What the forked processes of the checkpoint tests run."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def state_of(step: int, floats: int = 1000) -> dict[str, Any]:
    import torch

    return {
        "torchft.manager": {"step": step},
        "model": {"weight": torch.full((floats,), float(step))},
        "extra": {"step": step},
    }


def live_state() -> dict[str, Any]:
    return state_of(0)


def checkpoints(folder: str, *, keep: int = 1, **place: int) -> Any:
    from sky_monarch.training.checkpoint.plan import CheckpointPlan
    from sky_monarch.training.checkpoint.saving import Checkpoints

    return Checkpoints(CheckpointPlan(folder=Path(folder), every_steps=10, keep=keep), **place)


def restored(folder: str | Path) -> int | None:
    """Step of what a new process would go on from, after a look at its contents."""
    found = checkpoints(str(folder)).restore(live_state())
    if found is None:
        return None
    step, parts = found
    expected = state_of(step)
    assert parts["extra"] == expected["extra"]
    assert (parts["model"]["weight"] == expected["model"]["weight"]).all()
    return step


def die_at_operation(folder: str, number: int) -> list[str]:
    """SIGKILL this process right before its ``number``-th change below ``folder``; all are listed."""
    seen: list[str] = []

    def reached(what: str, path: object) -> None:
        if number >= 0 and len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(f"{what} {path}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if str(path).startswith(folder) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                reached("open", path)
        elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            reached(event, arguments[0])

    fsync = os.fsync

    def watched(fd: int) -> None:
        reached("fsync", fd)
        fsync(fd)

    os.fsync = watched
    sys.addaudithook(hook)
    return seen


def save_and_die(folder: str, report: str, number: int) -> None:
    """Save step 20, but die in the middle of it."""
    saver = checkpoints(folder)
    seen = die_at_operation(folder, number)
    assert saver.save(20, state_of(20))
    assert saver.flush(20)
    Path(report).write_text(json.dumps(list(seen)))


def save_often(folder: str, first: int, last: int) -> None:
    """One of several writers that know nothing of each other."""
    saver = checkpoints(folder, keep=2)
    for step in range(first, last, 10):
        assert saver.save(step, state_of(step))
        assert saver.flush(20)
    print(saver.news())


def shard(folder: str, report: str, port: int, rank: int, world_size: int, phase: str) -> None:
    """A rank of a group whose model is sharded by FSDP2: ``save`` trains a step and saves, ``load`` goes on.

    ``die``: as ``save`` for rank 0; rank 1 is killed in the middle.
    """
    import torch
    from torch import distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(7 if phase == "load" else 0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    mesh = dist.init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    saver = checkpoints(folder, rank=rank, world_size=world_size)
    saver._parameters = parameters
    saver.join(("127.0.0.1", port), 1)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if phase == "load":
        found = saver.restore(parts)
        assert found is not None
        step, parts = found
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        own = parts["mine"]
    else:
        step, own = 10, {"rank": rank, "position": torch.tensor([rank])}
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mine": own}
        if phase == "die" and rank == 1:
            die_at_operation(folder, 3)
        assert saver.save(20 if phase == "die" else 10, parts)
        if phase == "die":
            assert not saver.flush(0.5)
            Path(report).touch()
            signal.pause()
        assert saver.flush(30)

    def whole(value: Any) -> Any:
        return (value.full_tensor() if isinstance(value, DTensor) else value).tolist()

    states = [optimizer.state[param] for param in parameters]
    facts = {
        "step": step,
        "own": [own["rank"], own["position"].tolist()],
        "model": [whole(param) for param in parameters],
        "optimizer": [{name: whole(value) for name, value in state.items()} for state in states],
        "files": sorted(path.name for path in Path(folder).glob("step-*/*")),
        "news": saver.news(),
    }
    optimizer.zero_grad()
    model(torch.full((2, 6), 2.0)).square().sum().backward()
    optimizer.step()  # what was loaded must also be fit to go on with
    facts["next"] = [whole(param) for param in parameters]
    Path(report).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def upload_and_die(folder: str, url: str, part_bytes: int, parts: int) -> None:
    """Upload what is in ``folder``; SIGKILL this process after so many parts."""
    from sky_monarch.training.checkpoint import store as store_module
    from sky_monarch.training.checkpoint.folder import CheckpointFolder

    store_module._AT_ONCE = 1
    store = store_module.CheckpointStore(url, cancelled=threading.Event(), part_bytes=part_bytes)
    sent = [0]
    call = store._s3

    def counted(method: str, **arguments: Any) -> Any:
        answer = call(method, **arguments)
        sent[0] += method == "upload_part"
        if sent[0] >= parts:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    store._s3 = counted  # type: ignore[method-assign]
    it = CheckpointFolder(Path(folder)).complete()[-1]
    store.upload(Path(folder) / it.name, it)


def hold_upload_lock(folder: str, ready: str) -> None:
    """A process that is uploading the newest checkpoint, for ever."""
    from sky_monarch.training.checkpoint.folder import CheckpointFolder
    from sky_monarch.training.checkpoint.store import CheckpointStore
    from sky_monarch.training.checkpoint.uploading import Uploader

    place = CheckpointFolder(Path(folder))
    store = CheckpointStore("s3://bucket/x", cancelled=threading.Event())
    uploader = Uploader(place, store, keep=1, done=lambda it: None, failed=lambda it, why: None)
    with uploader._locked(place.path / place.complete()[-1].name) as mine:
        assert mine
        Path(ready).touch()
        signal.pause()
