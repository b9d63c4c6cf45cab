"""Durable checkpoints: half of one is never the newest, a damaged one is named, and the last good one stays."""

from __future__ import annotations

import errno
import json
import logging
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sky_monarch.errors import CheckpointError, ConfigError  # noqa: E402
from sky_monarch.training.checkpoint import contents  # noqa: E402
from sky_monarch.training.checkpoint.folder import CheckpointFolder  # noqa: E402
from sky_monarch.training.checkpoint.plan import CheckpointPlan  # noqa: E402
from sky_monarch.training.checkpoint.saving import Checkpoints  # noqa: E402
from tests.support.checkpoint_ranks import checkpoints, restored, state_of  # noqa: E402

pytestmark = pytest.mark.torch


def save(saver: Checkpoints, *steps: int, floats: int = 1000) -> None:
    for step in steps:
        assert saver.save(step, state_of(step, floats))
        assert saver.flush(20)


def steps(folder: Path) -> list[int]:
    return [it.step for it in CheckpointFolder(folder).complete()]


def home(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"step-{step:012d}*")
    return found


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert restored(folder) is None
    saver = checkpoints(str(folder), keep=2)
    save(saver, 10, 20)
    assert restored(folder) == 20
    assert saver.news() == {"checkpoint_step": 20, "checkpoint_bytes": pytest.approx(7900, rel=0.2)}


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_ones_are_kept_and_the_bytes_stay_bounded(tmp_path: Path, keep: int) -> None:
    saver = checkpoints(str(tmp_path), keep=keep)
    for step in range(10, 110, 10):
        save(saver, step)
        assert len(list(tmp_path.iterdir())) <= keep
    assert steps(tmp_path) == list(range(110 - 10 * keep, 110, 10))


def test_a_look_while_others_write_finds_no_less_than_there_always_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpoints(str(tmp_path), keep=2)
    save(saver, 10, 20)
    listing = CheckpointFolder._names

    def listed_just_before(folder: CheckpointFolder) -> list[str]:
        monkeypatch.setattr(CheckpointFolder, "_names", listing)
        names = listing(folder)
        save(saver, 30, 40)  # the two of the list go, and their successors are not in it
        return names

    monkeypatch.setattr(CheckpointFolder, "_names", listed_just_before)
    assert steps(tmp_path) == [30, 40]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_news_and_the_last_good_one_stays(
    small_disk: Path, foreseen: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not foreseen:  # others fill it while we write
        monkeypatch.setattr(Checkpoints, "_require_room", lambda *_: None)
    saver = checkpoints(str(small_disk))
    save(saver, 10)
    save(saver, 20, floats=1_000_000)
    assert saver.news()["checkpoint_failures"] == 1
    assert saver.news()["checkpoint_failed_step"] == 20
    assert saver.news()["checkpoint_errno"] == errno.ENOSPC
    warning = next(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "step 20" in warning
    assert str(small_disk) in warning
    assert ("are free" in warning) is foreseen
    assert restored(small_disk) == 10
    assert len(list(small_disk.iterdir())) == 1, "no rubbish is left"
    save(saver, 30)
    assert restored(small_disk) == 30


@pytest.mark.parametrize(("floats", "fits"), [(100_000, True), (200_000, False)])
def test_a_disk_that_will_be_too_small_is_news_before_the_first_save(
    small_disk: Path, caplog: pytest.LogCaptureFixture, floats: int, fits: bool
) -> None:
    """Of 2 MB, with two to keep and the next beside them: three times 0.4 MB, or 0.8."""
    saver = checkpoints(str(small_disk / "made" / "later"), keep=2)
    for step in (1, 2):
        saver.preflight(step, state_of(step, floats))
    news = saver.news()
    assert list(news) == (
        [] if fits else ["checkpoint_short_step", "checkpoint_needed_bytes", "checkpoint_room_bytes"]
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (not fits), "once"
    if not fits:
        assert news["checkpoint_short_step"] == 1
        assert news["checkpoint_needed_bytes"] == 3 * 4 * floats > news["checkpoint_room_bytes"]
        assert str(small_disk) in warnings[0]
    assert saver.folder.complete() == [], "nothing was written"


def test_a_file_that_may_not_grow_is_news_too(tmp_path: Path) -> None:
    saver = checkpoints(str(tmp_path))
    save(saver, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limits[1]))
    try:
        save(saver, 20, floats=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saver.news()["checkpoint_errno"] == errno.EFBIG
    assert restored(tmp_path) == 10


def test_a_folder_that_cannot_be_written_to_is_news(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = checkpoints(str(tmp_path / "file" / "below"))
    save(saver, 10)
    assert saver.news()["checkpoint_errno"] == errno.ENOTDIR


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit": lambda path: flip(path / "__0_0.distcp"),
    "a bit of the metadata": lambda path: flip(path / ".metadata"),
    "cut off": lambda path: (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1]),
    "a file is gone": lambda path: (path / "__0_0.distcp").unlink(),
    "the marker is gone": lambda path: (path / "COMPLETE").unlink(),
    "half a marker": lambda path: (path / "COMPLETE").write_text('{"format": 2, "st'),
    "an empty marker": lambda path: (path / "COMPLETE").write_text(""),
    "a marker of another step": lambda path: (path / "COMPLETE").write_text(
        (path / "COMPLETE").read_text().replace('"step": 20', '"step": 30')
    ),
    "a newer format": lambda path: (path / "COMPLETE").write_text('{"format": 3}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpoints(str(tmp_path), keep=2)
    save(saver, 10, 20)
    DAMAGES[damage](home(tmp_path, 20))
    (tmp_path / ".tmp-step-000000000030-00000000").mkdir()
    assert restored(tmp_path) == 10
    said = " ".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert home(tmp_path, 20).name in said
    assert ".tmp-step-000000000030" in said
    # Who goes on from there must not lose what is whole to what is not.
    save(checkpoints(str(tmp_path), keep=1), 15)
    assert restored(tmp_path) == 15


@pytest.mark.parametrize("damage", ["a bit", "cut off", "a file is gone", "half a marker", "a newer format"])
def test_where_all_are_damaged_nothing_begins_anew_over_them(tmp_path: Path, damage: str) -> None:
    save(checkpoints(str(tmp_path), keep=2), 10, 20)
    for step in (10, 20):
        DAMAGES[damage](home(tmp_path, step))
    with pytest.raises(CheckpointError, match="can be read; one of them") as caught:
        restored(tmp_path)
    assert "move them away" in str(caught.value.hint)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be read"):
        restored(tmp_path / "file")


def test_a_checkpoint_of_the_first_format_is_loaded_and_retired_like_any_other(tmp_path: Path) -> None:
    old = tmp_path / "step-000000000010"
    old.mkdir()
    state = state_of(10)
    manager = state.pop("torchft.manager")
    torch.save({"manager": manager, "states": state}, old / "state.pt")
    (old / "COMPLETE").write_text(json.dumps({"step": 10, "bytes": (old / "state.pt").stat().st_size}))
    assert restored(tmp_path) == 10
    save(checkpoints(str(tmp_path)), 20)
    assert steps(tmp_path) == [20]
    (tmp_path / "step-000000000030").mkdir()
    assert restored(tmp_path) == 20


def test_a_save_under_way_is_not_disturbed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), contents.write
    monkeypatch.setattr(contents, "write", lambda *args: (gate.wait(20), write(*args))[1])
    saver = checkpoints(str(tmp_path))
    assert saver.save(10, state_of(10))
    assert not saver.save(20, state_of(20))
    gate.set()
    assert saver.flush(20)
    assert restored(tmp_path) == 10


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), contents.write
    monkeypatch.setattr(contents, "write", lambda *args: (gate.wait(20), write(*args))[1])
    saver, state = checkpoints(str(tmp_path)), state_of(10)
    state["extra"]["list"] = [torch.zeros(2), {"deep": [1]}]
    assert saver.save(10, state)
    state["model"]["weight"].zero_()
    state["extra"]["list"][0].add_(1)
    state["extra"]["list"][1]["deep"].append(2)
    gate.set()
    assert saver.flush(20)
    assert restored_extra(tmp_path)["list"] == [[0.0, 0.0], {"deep": [1]}]


def restored_extra(folder: Path) -> dict[str, Any]:
    found = checkpoints(str(folder)).restore({})
    assert found is not None
    assert (found[1]["model"]["weight"] == 10).all()
    extra = found[1]["extra"]
    return {**extra, "list": [extra["list"][0].tolist(), extra["list"][1]]}


def test_names_that_look_alike_keep_their_own_values(tmp_path: Path) -> None:
    saver = checkpoints(str(tmp_path))
    odd = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: (torch.full((2,), 3), None, "text")}
    assert saver.save(10, {"model": odd, "rank0": {"x": torch.full((1,), 9)}})
    assert saver.flush(20)
    found = checkpoints(str(tmp_path)).restore({})
    assert found is not None
    model = found[1]["model"]
    assert (model["a.b"].item(), model["a"]["b"].item(), model[1][0].tolist()) == (1, 0, [3, 3])
    assert model[1][1:] == (None, "text")
    assert found[1]["rank0"]["x"].item() == 9


def test_what_a_checkpoint_lacks_begins_anew_and_what_no_longer_loads_is_an_error(tmp_path: Path) -> None:
    saver = checkpoints(str(tmp_path))
    save(saver, 10)
    shutil.copy(home(tmp_path, 10) / "COMPLETE", tmp_path / "kept")
    empty = home(tmp_path, 10) / ".metadata"
    empty.write_bytes(b"no pickle")
    marker = json.loads((tmp_path / "kept").read_text())
    import zlib

    marker["files"][".metadata"] = {"bytes": 9, "crc32": zlib.crc32(b"no pickle")}
    (home(tmp_path, 10) / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match="though it is whole"):
        restored(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "malformed"),
        ("[]", "malformed"),
        ('{"to": "x"}', "malformed"),
        ('{"to": "", "every_steps": 1}', "must be a folder"),
        ('{"to": "nowhere://bucket/x", "every_steps": 1}', "no store is known"),
        ('{"to": "memory://x", "every_steps": 1}', "memory of one process"),
        ('{"to": "x", "every_steps": 0}', "every_steps is 0"),
        ('{"to": "x", "every_steps": true}', "every_steps is True"),
        ('{"to": "x", "every_steps": 1, "keep": 0}', "keep is 0"),
        ('{"to": "x", "every_steps": 1, "on_notice": "pray"}', "on_notice is 'pray'"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CheckpointPlan.parse(text)


def test_a_plan_is_read_from_the_jobs_json() -> None:
    plan = CheckpointPlan.parse(json.dumps({"to": "file:///data/x", "every_steps": 5, "keep": 3}))
    assert plan == CheckpointPlan(folder=Path("/data/x"), every_steps=5, keep=3)
    assert plan.to == "/data/x"
    noticed = CheckpointPlan.parse(json.dumps({"to": "/x", "every_steps": 5, "on_notice": "checkpoint"}))
    assert noticed.on_notice
