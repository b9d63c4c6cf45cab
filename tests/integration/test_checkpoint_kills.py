"""Whatever dies while it saves, and whoever writes beside it: the newest complete checkpoint is whole."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from sky_monarch.training.checkpoint.folder import CheckpointFolder
from tests.support.checkpoint_ranks import checkpoints, restored, state_of
from tests.support.ports import reserved_port
from tests.support.waiting import eventually
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
RANKS = "tests.support.checkpoint_ranks"
LIMIT_S = 60


@pytest.mark.slow
def test_killed_before_any_operation_of_a_save_a_whole_checkpoint_is_loaded(
    zygote: Zygote, tmp_path: Path
) -> None:
    report, first = tmp_path / "operations", tmp_path / "first"
    saver = checkpoints(str(first))
    assert saver.save(10, state_of(10))
    assert saver.flush(20)
    undisturbed = shutil.copytree(first, tmp_path / "undisturbed")
    assert zygote.fork(f"{RANKS}:save_and_die", str(undisturbed), str(report), -1).wait(LIMIT_S) == 0
    operations = json.loads(report.read_text())
    kinds = {line.split()[0] for line in operations}
    assert kinds >= {"open", "fsync", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}, operations
    folders = [shutil.copytree(first, tmp_path / f"killed-{number}") for number in range(len(operations))]
    for at in range(0, len(folders), 4):  # so many at a time
        some = [
            zygote.fork(f"{RANKS}:save_and_die", str(folder), str(report), number)
            for number, folder in enumerate(folders[at : at + 4], at)
        ]
        assert [child.wait(LIMIT_S) for child in some] == [-signal.SIGKILL] * len(some), zygote.log()
    found = [restored(folder) for folder in folders]
    renamed = next(number for number, line in enumerate(operations) if line.startswith("os.rename"))
    while "COMPLETE" not in " ".join(operations[:renamed]):
        renamed = next(
            n for n in range(renamed + 1, len(operations)) if operations[n].startswith("os.rename")
        )
    assert found == [10] * (renamed + 1) + [20] * (len(operations) - renamed - 1)
    for folder in folders:  # and the next save leaves no rubbish
        saver = checkpoints(str(folder))
        assert saver.save(30, state_of(30))
        assert saver.flush(20)
        assert [path.name[:17] for path in folder.iterdir()] == ["step-000000000030"]


@pytest.mark.slow
def test_writers_that_know_nothing_of_each_other_leave_whole_checkpoints(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A hundred saves each. The one before goes when the next is complete: of each writer at most so many are there."""
    writers = [zygote.fork(f"{RANKS}:save_often", str(tmp_path), first, 1010) for first in (10, 10, 20)]
    folder, newest, most = CheckpointFolder(tmp_path), [], [0]

    def over() -> bool:
        newest.extend(it.step for it in folder.complete()[-1:])
        most[0] = max(most[0], len(list(tmp_path.iterdir())))
        return all(writer.code is not None for writer in writers)

    eventually(over, within_s=LIMIT_S)
    assert newest
    assert newest == sorted(newest), "the newest complete one never goes"
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0, 0], zygote.log()
    assert "was not saved" not in zygote.log(), zygote.log()
    assert restored(tmp_path) == 1000
    # Two are kept, each may be there once for each writer, and each writes one and may be removing others.
    assert most[0] <= 2 * 3 + 3 + 3, "the bytes are bounded"
    for it in folder.complete():
        folder.verify(it)


def run_group(zygote: Zygote, tmp_path: Path, phase: str, world_size: int = 2) -> list[dict[str, Any]]:
    reports = [tmp_path / f"{phase}-{world_size}-{rank}" for rank in range(world_size)]
    folder = str(tmp_path / "checkpoints")
    with reserved_port() as port:
        ranks = [
            zygote.fork(f"{RANKS}:shard", folder, str(report), port, rank, world_size, phase)
            for rank, report in enumerate(reports)
        ]
        if phase == "die":
            assert ranks[1].wait(LIMIT_S) == -signal.SIGKILL, zygote.log()
            eventually(reports[0].exists, within_s=LIMIT_S)
            ranks[0].kill()  # as the agent does with the rest of a group
            ranks[0].wait(LIMIT_S)
            return []
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * world_size, zygote.log()
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.slow
def test_the_ranks_of_a_group_save_their_shards_together_and_load_them_in_groups_of_any_size(
    zygote: Zygote, tmp_path: Path
) -> None:
    saved = run_group(zygote, tmp_path, "save")
    assert saved[0]["news"]["checkpoint_step"] == 10
    assert saved[1]["news"] == {}, "rank 0 speaks for its group"
    run_group(zygote, tmp_path, "die")  # half a checkpoint of step 20 is no hindrance
    loaded = run_group(zygote, tmp_path, "load")
    assert loaded[0]["files"] == [".metadata", "COMPLETE", "__0_0.distcp", "__1_0.distcp"]
    for rank in (0, 1):
        for what in ("step", "own", "model", "optimizer", "next"):
            assert loaded[rank][what] == saved[rank][what], what
    (alone,) = run_group(zygote, tmp_path, "load", world_size=1)
    assert (alone["model"], alone["optimizer"]) == (saved[0]["model"], saved[0]["optimizer"])


def test_a_rank_that_is_still_busy_costs_its_group_that_checkpoint_only(tmp_path: Path) -> None:
    pair = [checkpoints(str(tmp_path), rank=rank, world_size=2) for rank in (0, 1)]
    for saver in pair:
        saver._writer = "0" * 8
    release = eventually_released(pair[1])
    assert pair[0].save(10, state_of(10))
    assert pair[1].save(10, state_of(10))
    eventually(lambda: (tmp_path / ".tmp-step-000000000010-00000000/.meeting/sealed-0").exists())
    assert not pair[1].save(20, state_of(20))
    release()
    assert [saver.flush(20) for saver in pair] == [True, True]
    assert pair[0].save(20, state_of(20))
    assert pair[0].flush(30), "nobody waits for who will not come"
    assert pair[0].news()["checkpoint_failures"] == 1
    assert [saver.save(30, state_of(30)) for saver in pair] == [True, True]
    assert [saver.flush(20) for saver in pair] == [True, True]
    assert [it.step for it in CheckpointFolder(tmp_path).complete()] == [30]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000030-00000000"]


def eventually_released(saver: Any) -> Any:
    """Hold the sealing of ``saver`` back until the returned function is called."""
    import threading

    gate, seal = threading.Event(), saver.folder.seal

    def held(*arguments: Any) -> Any:
        assert gate.wait(30)
        return seal(*arguments)

    saver.folder.seal = held
    return gate.set
