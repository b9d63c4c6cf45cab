"""Checkpoints on a store: a real S3 server on loopback, and real bytes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from sky_monarch.errors import CheckpointError
from sky_monarch.training.checkpoint import store as store_module
from sky_monarch.training.checkpoint.folder import CheckpointFolder, Complete
from sky_monarch.training.checkpoint.plan import CheckpointPlan
from sky_monarch.training.checkpoint.saving import Checkpoints
from sky_monarch.training.checkpoint.store import CheckpointStore
from sky_monarch.training.checkpoint.uploading import Uploader
from tests.support.checkpoint_ranks import checkpoints, live_state, state_of
from tests.support.runs import ROOT, ended_at_exit
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    # What S3's libraries leave to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]
PART_BYTES = 5 << 20  # the least that S3 takes
SECRET = "never-to-be-seen-0123456789"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment in which S3 is a server of ours."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    env = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    before = {name: os.environ.get(name) for name in env}
    os.environ |= env
    yield env
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.stop()


@pytest.fixture
def url(s3: dict[str, str], tmp_path: Path) -> str:
    import s3fs

    bucket = f"bucket-{tmp_path.name.lower().replace('_', 'x')}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}/runs/one"


def saver_to(url: str, staging: Path, *, keep: int = 2) -> Checkpoints:
    return Checkpoints(CheckpointPlan(folder=staging, url=url, every_steps=10, keep=keep))


def save(saver: Checkpoints, *steps: int) -> None:
    for step in steps:
        assert saver.save(step, state_of(step))
        assert saver.flush(60)


def a_store(url: str) -> CheckpointStore:
    return CheckpointStore(url, cancelled=threading.Event(), part_bytes=PART_BYTES)


def steps_at(url: str) -> list[int]:
    return [it.step for it in a_store(url).survey()[0]]


def test_what_was_saved_on_a_host_that_is_gone_comes_back_from_s3(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sky_monarch")
    saver = saver_to(url, tmp_path / "staging")
    save(saver, 10, 20, 30)
    assert saver.news()["checkpoint_step"] == 30
    assert steps_at(url) == [20, 30], "the newest two are kept"
    assert len(list((tmp_path / "staging").iterdir())) == 1, "here only the last"
    shutil.rmtree(tmp_path / "staging")
    found = saver_to(url, tmp_path / "elsewhere").restore(live_state())
    assert found is not None
    assert (found[0], found[1]["extra"]["step"], found[1]["model"]["weight"][0].item()) == (30, 30, 30)
    assert "downloading" in caplog.text
    assert SECRET not in caplog.text


def test_a_damaged_one_on_s3_is_named_and_the_one_before_is_taken(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(saver_to(url, tmp_path / "staging"), 10, 20)
    store = a_store(url)
    newest = store.survey()[0][-1]
    path = store._path(newest.name, "__0_0.distcp")
    data = bytearray(store._fs.cat_file(path))
    data[100] ^= 1
    store._fs.pipe_file(path, bytes(data))
    half = store._path("step-000000000030-00000000", "__0_0.distcp")
    store._fs.pipe_file(half, b"half")
    elsewhere = saver_to(url, tmp_path / "elsewhere")
    found = elsewhere.restore(live_state())
    assert found is not None
    assert found[0] == 10
    assert elsewhere.news() == {"checkpoint_damaged_step": 20, "checkpoint_restored_step": 10}
    assert newest.name in caplog.text
    assert "step-000000000030-00000000" in caplog.text
    save(elsewhere, 40)
    assert not store._fs.exists(half), "a half one that is older goes"


def large(folder: Path) -> Complete:
    """A checkpoint whose file has three parts."""
    saver = checkpoints(str(folder))
    assert saver.save(10, state_of(10, floats=2 * PART_BYTES // 4 + 1000))
    assert saver.flush(60)
    return CheckpointFolder(folder).complete()[-1]


def start(function: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process, without torch."""
    code = f"from tests.support.checkpoint_ranks import {function} as call; call(*{arguments!r})"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-P", "-c", code], env=env, stderr=subprocess.PIPE, text=True)


def test_the_next_process_uploads_only_the_parts_that_are_missing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = large(tmp_path)
    victim = start("upload_and_die", str(tmp_path), url, PART_BYTES, 1)
    said = victim.communicate(timeout=60)
    assert victim.returncode == -signal.SIGKILL, said
    assert steps_at(url) == []
    calls: list[tuple[str, int]] = []
    store = a_store(url)
    call = store._s3

    def counted(method: str, **arguments: Any) -> Any:
        calls.append((method, arguments.get("PartNumber", 0)))
        return call(method, **arguments)

    monkeypatch.setattr(store, "_s3", counted)
    done: list[Complete] = []
    uploader = Uploader(
        CheckpointFolder(tmp_path),
        store,
        keep=1,
        done=done.append,
        failed=lambda it, why: pytest.fail(str(why)),
    )
    uploader.wake()
    assert uploader.wait(60)
    sent = [number for method, number in calls if method == "upload_part"]
    assert sorted(sent) == [2, 3], calls
    assert "create_multipart_upload" not in dict(calls)
    assert [one.name for one in done] == [it.name]
    (tmp_path / "back").mkdir()
    CheckpointFolder(tmp_path / "back").adopt(
        it.name, [*it.marker.files, "COMPLETE"], lambda file, path: store.fetch(it.name, file, path)
    )
    CheckpointFolder(tmp_path / "back").verify(it)
    uploader.wake()
    assert uploader.wait(60)
    assert len(done) == 1, "what is there is not uploaded again"


def test_parts_of_uploads_that_nobody_will_finish_are_removed(url: str, tmp_path: Path) -> None:
    store = a_store(url)
    bucket, key, _ = store._fs.split_path(store._path("step-000000000005-00000000", "__0_0.distcp"))
    store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    save(saver_to(url, tmp_path / "staging"), 10)
    assert not store._fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads")


def test_a_store_that_fails_for_a_while_is_asked_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BACKOFF_S", 0.001)
    saver = saver_to(url, tmp_path / "staging")
    assert saver._store is not None
    put, failures = saver._store._fs.put_file, iter([OSError("reset"), TimeoutError("slow")])

    def flaky(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return put(*arguments)

    monkeypatch.setattr(saver._store._fs, "put_file", flaky)
    save(saver, 10)
    assert saver.news()["checkpoint_step"] == 10
    assert "checkpoint_failures" not in saver.news()


def test_a_bucket_that_is_not_there_is_news_and_the_next_save_tries_again(
    s3: dict[str, str], tmp_path: Path
) -> None:
    saver = saver_to("s3://no-such-bucket/x", tmp_path / "staging")
    save(saver, 10)
    assert saver.news()["checkpoint_failures"] == 1
    assert "checkpoint_step" not in saver.news()
    assert [it.step for it in CheckpointFolder(tmp_path / "staging").complete()] == [10], "it stays here"
    found = saver_to("s3://no-such-bucket/x", tmp_path / "staging").restore(live_state())
    assert found is not None
    assert found[0] == 10, "and is good for a restart of this host"


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_TRIES", 2)
    monkeypatch.setattr(store_module, "_BACKOFF_S", 0.001)
    saver = saver_to("s3://bucket/x", tmp_path / "staging")
    assert saver._store is not None

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(saver._store._fs, "find", refuse)
    with pytest.raises(CheckpointError, match="nobody listens"):
        saver.restore(live_state())


def test_only_one_process_uploads_a_checkpoint_and_a_death_hands_it_on(url: str, tmp_path: Path) -> None:
    saver = checkpoints(str(tmp_path))
    assert saver.save(10, state_of(10))
    assert saver.flush(20)
    ready = tmp_path / "ready"
    done: list[Complete] = []
    uploader = Uploader(
        CheckpointFolder(tmp_path), a_store(url), keep=1, done=done.append, failed=lambda it, why: None
    )
    with ended_at_exit(start("hold_upload_lock", str(tmp_path), str(ready))):
        eventually(ready.exists, within_s=30)
        uploader.wake()
        assert uploader.wait(30)
        assert (done, steps_at(url)) == ([], [])
        assert uploader.in_use() == {CheckpointFolder(tmp_path).complete()[-1].name}, "nobody may remove it"
    uploader.wake()
    assert uploader.wait(30)
    assert steps_at(url) == [10]


def test_the_marker_says_what_is_on_the_store(url: str, tmp_path: Path) -> None:
    save(saver_to(url, tmp_path / "staging"), 10)
    store = a_store(url)
    marker = json.loads(store._fs.cat_file(store._path(store.survey()[0][0].name, "COMPLETE")))
    assert sorted(marker["files"]) == [".metadata", "__0_0.distcp"]
