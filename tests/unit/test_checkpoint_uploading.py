"""Who uploads a checkpoint holds it until it is done, whatever else its own process asks meanwhile."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sky_monarch.training.checkpoint.folder import CheckpointFolder, Complete
from sky_monarch.training.checkpoint.layout import Marker, name_of
from sky_monarch.training.checkpoint.store import CheckpointStore
from sky_monarch.training.checkpoint.uploading import Uploader

TAKES = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.mark.parametrize("asks", ["when it is taken", "just before"])
def test_a_save_that_asks_what_is_in_use_takes_no_checkpoint_from_its_uploader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    folder, name = CheckpointFolder(tmp_path / "here"), name_of(7, "0f0f0f0f")
    tmp = folder.begin(name)
    (tmp / "part").write_bytes(b"state")
    files = folder.seal(tmp, ["part"])
    folder.publish(tmp, name, Marker(step=7, world_size=1, files=files))
    done: list[Complete] = []
    errors: list[Exception] = []
    seen: list[tuple[set[str], int]] = []

    class Watched(CheckpointStore):
        def upload(self, home: Path, it: Complete) -> None:
            other = subprocess.run([sys.executable, "-c", TAKES, home / ".upload.lock"], capture_output=True)
            seen.append((uploader.in_use(), other.returncode))
            super().upload(home, it)

    store = Watched("memory://attic", cancelled=threading.Event())
    uploader = Uploader(folder, store, keep=1, done=done.append, failed=lambda _, why: errors.append(why))
    lock, look = fcntl.lockf, Uploader._is_locked
    asked, taken = iter([True]), threading.Event()

    def at_that_moment(fd: int, how: int) -> None:
        lock(fd, how)
        if asks == "when it is taken" and next(asked, False):
            assert uploader.in_use() == {name}
        taken.set()

    def looked_at_too_late(uploader: Uploader, what: str) -> bool:
        if next(asked, False):
            (folder.path / name / ".upload.lock").touch()
            uploader.wake()
            assert not taken.wait(0.5), "it is taken when nobody is about to look"
        return look(uploader, what)

    monkeypatch.setattr("sky_monarch.training.checkpoint.uploading.fcntl.lockf", at_that_moment)
    if asks == "just before":
        monkeypatch.setattr(Uploader, "_is_locked", looked_at_too_late)
        assert uploader.in_use() == set()
    uploader.wake()
    assert uploader.wait(30)
    assert errors == []
    assert [it.name for it in done] == [name]
    assert seen == [({name}, 1)], "another process could not take it"
    assert uploader.in_use() == set()
