"""``debug-bundle``: what a maintainer needs, of any run in any state, and no byte of a secret."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from sky_monarch.sdk.bundle import write_new
from tests.support.files import read
from tests.support.runs import Workbench, ended_at_exit
from tests.support.waiting import eventually

KEY = "canary/key+7'2\"6&1é"
MODE = "canary-mode-9137"
EXPORTED = "canary-exported-5528"
TYPED = "canary-typed-4411"
PRINTED = "canary-printed-3306"
PLANTED = (KEY, MODE, EXPORTED, TYPED, PRINTED)

LEAKY = r"""
import base64, json, os, sys, time
from urllib.parse import quote
key = os.environ["KEY"]
for value in (key, os.environ["MODE"], os.environ["MY_EXPORT"], os.environ["SKY_MONARCH_TOKEN"]):
    print("plain", value)
    print("coded", base64.b64encode(value.encode()).decode(), base64.b64encode(("me:" + value).encode()).decode())
    print("quoted", quote(value), quote(value, safe=""), json.dumps({"k": value}), repr(value), value.encode().hex())
print("started as: train.py --api-token=canary-printed-3306 s3://me:canary-printed-3306@host/bucket")
print(os.environ["TORCHFT_LIGHTHOUSE"], flush=True)
open("printed", "w").close()
"""
WAITS = LEAKY + "time.sleep(300)\n"
FAILS = LEAKY + 'raise ValueError("not with " + key)\n'


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        found = {}
        for entry in tar:
            assert entry.isreg()
            assert not entry.name.startswith("/")
            assert ".." not in Path(entry.name).parts
            file = tar.extractfile(entry)
            assert file is not None
            found[entry.name] = file.read()
        return found


def forms(value: str) -> list[bytes]:
    raw = value.encode()
    return [
        raw,
        quote(value).encode(),
        quote(value, safe="").encode(),
        quote_plus(value).encode(),
        json.dumps(value)[1:-1].encode(),
        json.dumps(value, ensure_ascii=False)[1:-1].encode(),
        repr(value)[1:-1].encode(),
        base64.b64encode(raw),
        base64.urlsafe_b64encode(raw),
        base64.b64encode(b"me:" + raw)[4:-4],
        raw.hex().encode(),
    ]


def assert_holds_no(values: tuple[str, ...], path: Path) -> dict[str, bytes]:
    """Nothing of any value in any form, in any member, nor in the archive itself."""
    found = members(path)
    packed = {**found, "the archive": path.read_bytes()}
    for value in values:
        for form in forms(value):
            holders = [name for name, data in packed.items() if form in data]
            assert not holders, (form, holders)
    assert not {
        name: data[i - 80 : i + 30] for name, data in packed.items() if (i := data.find(b"canary")) >= 0
    }
    return found


@pytest.fixture
def leaky(workbench: Workbench) -> Path:
    """A job whose ranks print every secret that they know."""
    workbench.env |= {"MY_EXPORT": EXPORTED, "KEY": KEY}
    script = workbench.folder / "leaky.py"
    script.write_text(WAITS)
    return workbench.job(
        "leaky",
        run=f"{sys.executable} {script} --password {TYPED}",
        replicas=1,
        envs={"MODE": MODE},
        recovery={"max_restarts": 0},
    )


def bundle(workbench: Workbench, *arguments: str) -> dict[str, Any]:
    done = workbench.cli("debug-bundle", *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "canary" not in done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_bundle_of_a_live_a_lost_and_an_ended_run_tells_all_but_its_secrets(
    workbench: Workbench, leaky: Path
) -> None:
    name = workbench.up(leaky, "--secret", "KEY")
    eventually((workbench.folder / "printed").exists)
    token = workbench.folder_of(name).token
    assert token
    before = sorted(path for path in workbench.folder.iterdir())

    live = bundle(workbench, "-o", "live.tar.gz")
    found = assert_holds_no((*PLANTED, token), workbench.folder / "live.tar.gz")
    assert live["run_id"] == workbench.folder_of(name).run_id, "the newest live one was meant"
    assert (workbench.folder / "live.tar.gz").stat().st_mode & 0o777 == 0o600
    assert sorted(workbench.folder.iterdir()) == sorted([*before, workbench.folder / "live.tar.gz"])
    assert json.loads(found["job.json"])["envs"] == ["MODE"], "names stay"
    assert json.loads(found["job.json"])["secrets"] == ["KEY"]
    assert json.loads(found["status.json"])["state"] == "RUNNING"
    assert "participants" in found["lighthouse-status.json"].decode()
    assert b"plain [secret]\n" in found["logs/r0-0/g1.log"]
    assert b"plain [env]\n" in found["logs/r0-0/g1.log"]
    for log in ("agent.log", "controller.log", "lighthouse.log"):
        assert found[log]
    events = [json.loads(line) for line in found["events.ndjson"].splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    copy = workbench.folder / "copy.db"
    copy.write_bytes(found["journal.db"])
    with sqlite3.connect(copy) as db:
        assert db.execute("SELECT count(*) FROM events WHERE kind = 'rank_spawned'").fetchone() == (1,)
    db.close()
    assert any("leaky.py" in one["command"] for one in json.loads(found["processes.json"]))
    assert json.loads(found["versions.json"])["packages"]
    assert "MemTotal" in json.loads(found["host.json"])["files"]["/proc/meminfo"]

    workbench.kill_agent_for_good(name)
    bundle(workbench, name, "-o", "lost.tar.gz")
    found = assert_holds_no((*PLANTED, token), workbench.folder / "lost.tar.gz")
    assert json.loads(found["status.json"])["state"] == "LOST"
    assert b"plain [secret]\n" in found["logs/r0-0/g1.log"]

    assert workbench.cli("down", name).returncode == 0
    assert workbench.folder_of(name).private is None
    bundle(workbench, name, "-o", "ended.tar.gz")
    found = assert_holds_no((*PLANTED, token), workbench.folder / "ended.tar.gz")
    assert json.loads(found["status.json"])["state"] == "FAILED"
    assert b"plain [secret]\n" in found["logs/r0-0/g1.log"], "nobody knows the values any more"


def test_a_run_that_failed_shows_its_exception_and_hides_the_secret_in_it(
    workbench: Workbench, leaky: Path
) -> None:
    (workbench.folder / "leaky.py").write_text(FAILS)
    up = workbench.cli("up", str(leaky), "--secret", "KEY")
    workbench.names.append("leaky")
    assert up.returncode == 4, up.stdout + up.stderr
    made = bundle(workbench, "leaky", "-o", "failed.tar.gz")
    found = assert_holds_no(PLANTED, workbench.folder / "failed.tar.gz")
    assert "logs/r0-0/g1.log" in made["members"]
    events = [json.loads(line) for line in found["events.ndjson"].splitlines()]
    (ended,) = [event for event in events if event["event"] == "rank_exited"]
    assert ended["traceback"][-1] == "ValueError: not with [secret]"
    (record,) = json.loads(found["final.json"])["recoveries"]
    assert record["where"].endswith(f"leaky.py:{len(FAILS.splitlines())}")

    # Where the excerpt is gone too, what the ranks printed stays here.
    (workbench.folder_of("leaky").path / "redacted.tar.gz").unlink()
    made = bundle(workbench, "leaky", "-o", "without.tar.gz")
    found = assert_holds_no(PLANTED, workbench.folder / "without.tar.gz")
    assert "values are unknown" in made["notes"]["logs"]
    assert not any(member.startswith("logs/") for member in found)
    assert b"ValueError" not in found["events.ndjson"]
    assert b"rank_exited" in found["events.ndjson"]


def fake_run(workbench: Workbench, run_id: str = "broken-20261130-120000-beef") -> Path:
    folder = workbench.home / "runs" / run_id
    (folder / "logs" / "r0-0").mkdir(parents=True, mode=0o700)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "name": "broken", "created_ms": 1}))
    (folder / "private.json").write_text(json.dumps({"token": "t0ken", "secrets": {"KEY": KEY}}))
    return folder


def test_a_damaged_run_has_its_bundle_too(workbench: Workbench) -> None:
    folder = fake_run(workbench)
    outside = workbench.folder / "outside.txt"
    outside.write_text("canary outside of the run")
    (folder / "journal.db").write_bytes(b"no database " + KEY.encode())
    (folder / "job.json").write_text('{"name": ')
    (folder / "final.json").write_bytes(b"\xff\xfe")
    (folder / "agent.log").symlink_to(outside)
    os.mkfifo(folder / "controller.log")
    (folder / "logs" / "r1-0").symlink_to(workbench.folder)
    # A secret across two files, behind more output than a bundle holds.
    old = b"old\n" * (1 << 20)
    (folder / "logs" / "r0-0" / "g1-000000000000.log").write_bytes(old + KEY.encode()[:5])
    (folder / "logs" / "r0-0" / f"g1-{len(old) + 5:012}.log").write_bytes(KEY.encode()[5:] + b" new\n")
    made = bundle(workbench, "broken", "-o", "broken.tar.gz")
    found = assert_holds_no((KEY,), workbench.folder / "broken.tar.gz")
    assert {"job.json", "final.json", "events.ndjson", "agent.log", "controller.log"} <= set(made["notes"])
    assert found["logs/r0-0/g1.log"].endswith(b"old\n[secret] new\n")
    assert len(found["logs/r0-0/g1.log"]) < 3 << 20
    assert "begins here" in made["notes"]["logs/r0-0/g1.log"]
    # And with secrets that cannot be read, or in a folder that is all but empty.
    (folder / "private.json").write_text("{")
    shutil.rmtree(folder / "logs")
    bundle(workbench, "broken", "-o", "again.tar.gz")
    assert_holds_no((KEY,), workbench.folder / "again.tar.gz")
    shutil.rmtree(folder)
    nothing = bundle(workbench, "-o", "nothing.tar.gz")
    assert nothing["run_id"] is None
    assert "versions.json" in members(workbench.folder / "nothing.tar.gz")


@pytest.mark.parametrize("step", ["fsync", "link", "open"])
def test_whatever_interrupts_the_write_the_folder_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"sky_monarch.sdk.bundle.os.{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "half.tar.gz", b"data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_replaced_and_an_interrupted_one_leaves_nothing(workbench: Workbench) -> None:
    folder = fake_run(workbench)
    taken = workbench.folder / "taken.tar.gz"
    taken.write_text("mine")
    for target, why in ((taken, "exists"), (workbench.folder / "no" / "x.tar.gz", "no folder")):
        done = workbench.cli("debug-bundle", "broken", "-o", str(target))
        assert done.returncode == 2, done.stderr
        assert why in done.stderr
    assert taken.read_text() == "mine"
    assert workbench.cli("debug-bundle", "nobody").returncode == 6
    before = sorted(workbench.folder.iterdir())
    # So much that packing it takes a while.
    for number in range(6):
        noise = os.urandom(1 << 20).hex().encode()
        (folder / "logs" / "r0-0" / f"g{number}-000000000000.log").write_bytes(noise)

    def interrupted() -> bool:
        started = workbench.popen("debug-bundle", "broken", "-o", "half.tar.gz", stdin=subprocess.DEVNULL)
        with ended_at_exit(started) as process:
            maps = Path(f"/proc/{process.pid}/maps")
            eventually(lambda: process.poll() is not None or b"zlib" in read(maps), every_s=0.005)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        if process.returncode == 0:  # it was done before the signal came: once more
            (workbench.folder / "half.tar.gz").unlink()
            return False
        assert process.returncode == 130, said
        assert sorted(workbench.folder.iterdir()) == before, "it leaves nothing"
        return True

    assert any(interrupted() for _ in range(5))
    assert workbench.cli("debug-bundle", "broken", "-o", "whole.tar.gz").returncode == 0
    with tarfile.open(fileobj=io.BytesIO((workbench.folder / "whole.tar.gz").read_bytes())) as tar:
        assert len([name for name in tar.getnames() if name.startswith("logs/r0-0/")]) == 6
