"""Where checkpoints may go is checked before anything starts, and what is missing is named."""

from __future__ import annotations

import json

import pytest

from sky_monarch.config import JobSpec, check_job
from sky_monarch.config.checkpoint_target import folder_of, require_usable
from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.controller.checkpoints import CheckpointNews
from sky_monarch.errors import ConfigError


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("checkpoints", "checkpoints"),
        ("/data/a b", "/data/a b"),
        ("file:///data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
        ("s3://bucket/x", None),
        ("S3://bucket/x", None),
        ("c:odd", "c:odd"),
    ],
)
def test_a_folder_is_told_from_a_url(target: str, folder: str | None) -> None:
    assert folder_of(target) == folder


@pytest.mark.parametrize(
    ("target", "missing", "message", "fix"),
    [
        ("s3://b/x", "s3fs", "s3:// needs s3fs, which is not installed", "pip install 'sky-monarch[s3]'"),
        ("s3://b/x", "fsspec", "s3:// needs fsspec", "pip install 'sky-monarch[s3]'"),
        ("gs://b/x", "gcsfs", "gs:// needs gcsfs", "pip install gcsfs"),
        ("abfs://b/x", "adlfs", "abfs:// needs adlfs", "pip install adlfs"),
        ("s3:///x", "", "names no bucket", "write s3://bucket/folder"),
        ("s3://key:secret@b/x", "", "must hold no credentials", "`secrets`"),
        ("s3://b/x?key=secret", "", "must hold no credentials", "`secrets`"),
        ("memory://b/x", "", "the memory of one process", "name a folder"),
        ("https://b/x", "", "nothing can be written there", "name a folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_way_out(
    target: str, missing: str, message: str, fix: str
) -> None:
    with pytest.raises((FieldRefusalError, ConfigError)) as caught:
        require_usable(target, find=lambda module: None if module == missing else object())
    assert message in str(caught.value)
    refused = caught.value
    assert fix in str(refused.fix if isinstance(refused, FieldRefusalError) else refused.hint)
    assert "secret@" not in str(caught.value)
    assert "=secret" not in str(caught.value)


def test_a_job_file_may_name_a_store_whatever_is_installed_and_keeps_the_url_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sky_monarch.config.checkpoint_target.find_spec", lambda _: None)
    job = {"name": "x", "replicas": 1, "run": "true", "checkpoint": {"to": "s3://b/x", "every_steps": 1}}
    checked = check_job(json.dumps(job) + "\n")
    assert checked.job is not None, checked.problems
    assert checked.job.checkpoint is not None
    assert checked.job.checkpoint.to == "s3://b/x"


def test_a_job_from_python_cannot_hold_credentials_in_its_target_either() -> None:
    fields = {"name": "x", "replicas": 1, "run": "true"}
    with pytest.raises(ConfigError, match="must hold no credentials") as caught:
        JobSpec(**fields, checkpoint={"to": "s3://key:secret@b/x", "every_steps": 1})
    assert "key:secret" not in str(caught.value)
    assert JobSpec(**fields, checkpoint={"to": "/data/x@y?z", "every_steps": 1}).checkpoint is not None


def progress(generation: int = 1, **metrics: float) -> dict[str, object]:
    slot = {"replica": 1, "rank": 0}
    return {"slot": slot, "generation": generation, "step": 7, "metrics": {"loss": 1.0, **metrics}}


def test_what_a_session_says_of_checkpoints_becomes_one_event_each() -> None:
    news = CheckpointNews("/data/x")
    said = {"checkpoint_failures": 1.0, "checkpoint_failed_step": 20.0, "checkpoint_errno": 28.0}
    left, (row,) = news.take(progress(**said, checkpoint_errors=float("nan")))
    assert left["metrics"]["loss"] == 1.0
    assert "checkpoint_failures" not in left["metrics"]
    assert row["event"] == "checkpoint_failed"
    assert (row["replica"], row["step"], row["to"], row["error"]) == (
        1,
        20,
        "/data/x",
        "No space left on device",
    )
    news.apply(row)
    assert news.take(progress(**said))[1] == [], "once"
    again, saved = news.take(
        progress(**{**said, "checkpoint_failures": 2}, checkpoint_step=30, checkpoint_bytes=5)
    )[1]
    assert (again["event"], again["number"], saved["event"], saved["bytes"]) == (
        "checkpoint_failed",
        2,
        "checkpoint_saved",
        5,
    )
    assert len(news.take(progress(generation=2, **said))[1]) == 1, "another generation counts anew"


def test_a_disk_that_will_be_too_small_is_an_event_with_both_sizes() -> None:
    said = {"checkpoint_short_step": 1.0, "checkpoint_needed_bytes": 9e9, "checkpoint_room_bytes": 5.0}
    (row,) = CheckpointNews("/data/x").take(progress(**said))[1]
    assert (row["event"], row["step"]) == ("checkpoint_no_room", 1)
    assert (row["needed_bytes"], row["room_bytes"], row["to"]) == (9_000_000_000, 5, "/data/x")


def test_a_controller_that_was_restarted_tells_nothing_twice() -> None:
    row = CheckpointNews("x").take(progress(checkpoint_step=30))[1][0]
    restarted = CheckpointNews("x")
    restarted.apply(row)
    assert restarted.take(progress(checkpoint_step=30))[1] == []


def test_a_job_without_checkpoints_has_no_news_of_them() -> None:
    report = progress(checkpoint_step=30)
    assert CheckpointNews(None).take(report) == (report, [])
