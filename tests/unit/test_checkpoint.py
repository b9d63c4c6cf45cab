"""Durable checkpoints: half of one is never the newest, and the last good one stays."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sky_monarch.errors import CheckpointError, ConfigError  # noqa: E402
from sky_monarch.training.checkpoint import CheckpointFolder, CheckpointPlan, snapshot  # noqa: E402

pytestmark = pytest.mark.torch
REPO = Path(__file__).parents[2]


def folder(path: Path, *, every_steps: int = 10, keep: int = 2) -> CheckpointFolder:
    return CheckpointFolder(CheckpointPlan(to=path, every_steps=every_steps, keep=keep))


def save(checkpoints: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        assert checkpoints.save(step, {"step": step, "weights": torch.full((100,), float(step))}, wait=True)


def newest(checkpoints: CheckpointFolder) -> int | None:
    found = checkpoints.load_newest()
    if found is None:
        return None
    step, state = found
    assert state["step"] == step
    assert torch.equal(state["weights"], torch.full((100,), float(step)))
    return step


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path / "new" / "folder")
    assert newest(checkpoints) is None
    save(checkpoints, 10, 20)
    assert newest(checkpoints) == 20


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_ones_are_kept_and_the_bytes_stay_bounded(tmp_path: Path, keep: int) -> None:
    checkpoints = folder(tmp_path, keep=keep)
    for step in range(10, 110, 10):
        save(checkpoints, step)
        assert len(list(tmp_path.iterdir())) <= keep
    assert checkpoints.complete_steps() == list(range(110 - 10 * keep, 110, 10))


def test_the_older_one_is_removed_only_after_the_newer_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = folder(tmp_path, keep=1)
    save(checkpoints, 10)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        save(checkpoints, 20)
    assert (checkpoints.failures, newest(checkpoints)) == (1, 10)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000010"], "no rubbish is left"
    save(checkpoints, 30)
    assert newest(checkpoints) == 30


def test_a_full_disk_is_a_warning_and_the_last_good_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = folder(tmp_path, keep=1)
    save(checkpoints, 10)
    # A real limit of the kernel's: a write beyond it fails with EFBIG, as one on a full disk with ENOSPC.
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limits[1]))
    try:
        assert checkpoints.save(20, {"step": 20, "weights": torch.zeros(100_000)}, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.failures == 1
    assert newest(checkpoints) == 10
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert "step 20" in warning.getMessage()
    assert str(tmp_path) in warning.getMessage()


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = folder(tmp_path / "file" / "below")
    save(checkpoints, 10)
    assert checkpoints.failures == 1
    assert "Not a directory" in str(checkpoints.last_error)


def test_half_a_checkpoint_is_skipped_by_name_and_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = folder(tmp_path, keep=2)
    save(checkpoints, 10, 20)
    (tmp_path / "step-000000000020" / "COMPLETE").unlink()
    (tmp_path / ".tmp-step-000000000030-123").mkdir()
    assert newest(checkpoints) == 10
    skipped = " ".join(record.getMessage() for record in caplog.records)
    assert "step-000000000020" in skipped
    assert "step-000000000030" in skipped
    save(checkpoints, 40)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000000000010", "step-000000000040"]


def test_a_complete_one_that_cannot_be_read_is_an_error_not_a_silent_step_back(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path)
    save(checkpoints, 10, 20)
    state = tmp_path / "step-000000000020" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes; its marker says") as caught:
        checkpoints.load_newest()
    assert "step-000000000020" in str(caught.value)


def test_a_save_under_way_is_not_disturbed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = folder(tmp_path)
    write = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (time.sleep(0.3), write(*args))[1])
    assert checkpoints.save(10, {"step": 10, "weights": torch.full((100,), 10.0)})
    assert not checkpoints.save(20, {})
    assert checkpoints.wait(10)
    assert newest(checkpoints) == 10


def slow_saver() -> None:
    """Saves for ever, slowly; killed at a random moment by the test below."""
    write = torch.save

    def slow(state: Any, file: Any) -> None:
        write(state, file)
        file.flush()
        time.sleep(0.004)

    torch.save = slow
    checkpoints = folder(Path(sys.argv[1]), keep=2)
    print("ready", flush=True)
    for step in range(10, 100_000, 10):
        save(checkpoints, step)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    code = f"import runpy; runpy.run_path({__file__!r})['slow_saver']()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_killed_in_mid_save_the_newest_complete_one_is_whole(
    tmp_path: Path, saver: subprocess.Popen[str]
) -> None:
    assert saver.stdout is not None
    assert saver.stdout.readline() == "ready\n"
    checkpoints = folder(tmp_path, keep=2)
    seen = 0
    for _ in range(10):  # looked at while it saves: at each moment a whole one is the newest
        time.sleep(0.05)
        steps = checkpoints.complete_steps()
        seen = max([seen, *steps])
        assert len(list(tmp_path.iterdir())) <= 4
    saver.kill()
    saver.wait()
    found = newest(checkpoints)
    assert found is not None
    assert found >= seen > 0


def test_a_snapshot_does_not_change_with_the_training(tmp_path: Path) -> None:
    weights = torch.zeros(3)
    state = {"a": [weights, {"b": (weights, 1)}], "c": "text"}
    copy = snapshot(state)
    weights += 1
    assert copy["a"][0].tolist() == [0, 0, 0]
    assert copy["a"][1]["b"][0].tolist() == [0, 0, 0]
    assert copy["c"] == "text"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "malformed"),
        ("[]", "malformed"),
        ('{"to": "x"}', "malformed"),
        ('{"to": "", "every_steps": 1}', "must be a folder"),
        ('{"to": "s3://bucket/x", "every_steps": 1}', "only folders"),
        ('{"to": "x", "every_steps": 0}', "every_steps is 0"),
        ('{"to": "x", "every_steps": true}', "every_steps is True"),
        ('{"to": "x", "every_steps": 1, "keep": 0}', "keep is 0"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CheckpointPlan.parse(text)


def test_a_plan_is_read_from_the_jobs_json() -> None:
    plan = CheckpointPlan.parse(json.dumps({"to": "file:///data/x", "every_steps": 5, "keep": 3}))
    assert plan == CheckpointPlan(to=Path("/data/x"), every_steps=5, keep=3)
