"""The SDK against a process that serves the controller's API, and against what such a process leaves."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

import sky_monarch as sm
from sky_monarch.errors import ChannelTimeoutError, ConfigError, PeerRefusedError, RunCancelledError
from sky_monarch.launch.folder import RunFolder, write_json
from sky_monarch.sdk import _api

DOUBLE = Path(__file__).with_name("controller_double.py")


def eventually(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path / "s"))
    return tmp_path / "s"


@pytest.fixture
def start(state):
    """Starts a double: ``(folder, process)``."""
    started = []

    def begin(name="x"):
        process = subprocess.Popen([sys.executable, DOUBLE, state, name], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return RunFolder(state / "runs" / process.stdout.readline().strip()), process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def write_events(folder, *numbers):
    lines = [
        {"id": number, "wall_ms": 1000 + number, "event": "notice", "message": f"n{number}"}
        for number in numbers
    ]
    with (folder.path / "events.ndjson").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_logs(folder, *lines):
    with (folder.path / "logs.ndjson").open("a") as file:
        for replica, text in lines:
            file.write(json.dumps({"replica": replica, "rank": 0, "generation": 1, "line": text}) + "\n")


def write_journal(folder, *numbers):
    with closing(sqlite3.connect(folder.journal)) as journal, journal:
        journal.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, event TEXT)")
        events = [(n, {"wall_ms": n, "event": "notice", "message": f"n{n}"}) for n in numbers]
        rows = [(n, json.dumps(event)) for n, event in events]
        journal.executemany("INSERT INTO events VALUES (?, ?)", rows)


def end(folder, process, **final):
    write_json(folder.path / "final.json", {"run_id": folder.run_id, "name": folder.name, **final})
    process.terminate()
    process.wait()


def test_status_is_typed_and_keeps_unknown_fields_out(start):
    folder, _ = start()
    groups = [
        {
            "replica": 0,
            "state": "RUNNING",
            "generation": 3,
            "new_field": 1,
            "ranks": [{"rank": 0, "pid": None, "state": "exited", "exit": {"signal": 9, "oom": True}}],
        }
    ]
    (folder.path / "status.json").write_text(
        json.dumps({"groups": groups, "quorum": {"quorum_id": 7}, "later": 2})
    )
    status = sm.status("x")
    assert status.groups[0].generation == 3
    assert str(status.groups[0].ranks[0].exit) == "killed by SIGKILL (out of memory)"
    assert status.quorum.quorum_id == 7
    assert sm.RunStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_client_without_the_token_is_refused(start):
    folder, _ = start()
    write_json(folder.path / "private.json", {"token": "other"})
    with pytest.raises(PeerRefusedError):
        sm.status("x")


def test_a_silent_controller_is_given_up_on_at_the_deadline(start):
    folder, _ = start()
    (folder.path / "silent").touch()
    began = time.monotonic()
    with sm.attach("x") as run, pytest.raises(ChannelTimeoutError, match="not answered"):
        run.status(patience_s=0.3)
    assert 0.3 <= time.monotonic() - began < 15, "unless it is told, it waits for 20 s"


def test_a_controller_that_comes_back_is_waited_for(start):
    folder, _ = start()
    (folder.path / "silent").touch()
    threading.Timer(0.3, (folder.path / "silent").unlink).start()
    assert sm.status("x").state == "RUNNING"


def test_followed_events_survive_hang_ups_without_loss_or_repetition(start):
    folder, process = start()
    write_events(folder, 1, 2)
    with sm.attach("x") as run:
        events = run.events(follow=True)
        got = [next(events).id, next(events).id]
        (folder.path / "hangup").touch()
        eventually(lambda: not (folder.path / "hangup").exists())
        write_events(folder, 3)
        got.append(next(events).id)
        write_journal(folder, 1, 2, 3, 4)
        end(folder, process, state="SUCCEEDED")
        got += [event.id for event in events]
    assert got == [1, 2, 3, 4], "the last one is in the journal only"


def test_followed_logs_survive_hang_ups_without_loss_or_repetition(start):
    folder, process = start()
    write_logs(folder, (0, "a"), (1, "a"), (0, "a"))
    with sm.attach("x") as run:
        lines = run.logs(follow=True)
        got = [next(lines) for _ in range(3)]
        (folder.path / "hangup").touch()
        eventually(lambda: not (folder.path / "hangup").exists())
        write_logs(folder, (1, "b"))
        got.append(next(lines))
        (folder.path / "logs" / "r0-0").mkdir(parents=True)
        (folder.path / "logs" / "r0-0" / "g1-000000000000.log").write_bytes(b"a\na\nlast")
        end(folder, process, state="SUCCEEDED")
        got += lines
    assert [(line.prefix, line.line) for line in got] == [
        ("[0/0]", "a"), ("[1/0]", "a"), ("[0/0]", "a"), ("[1/0]", "b"), ("[0/0]", "last")
    ]  # fmt: skip


def test_events_and_logs_of_an_ended_run_come_from_its_folder(start):
    folder, process = start()
    write_journal(folder, 1, 2, 3)
    slot = folder.path / "logs" / "r1-0"
    slot.mkdir(parents=True)
    (slot / "g2-000000000000.log").write_bytes(b"third\n")
    (slot / "g1-000000000000.log").write_bytes(b"first \xff\xfe half of ")
    (slot / "g1-000000000016.log").write_bytes(b"second\r50%\n")
    end(folder, process, state="FAILED", exit_code=1, reason="boom")
    assert [event.id for event in sm.events("x", after=1)] == [2, 3]
    assert [line.line for line in sm.logs("x")] == ["first �� half of second\r50%", "third"]
    assert [line.line for line in sm.logs("x", tail=1)] == ["third"]
    assert list(sm.logs("x", replica=0)) == []
    with sm.attach("x") as run:
        assert b"".join(run.log_bytes(replica=1, rank=0)) == b"first \xff\xfe half of second\r50%\nthird\n"
        assert b"".join(run.log_bytes(replica=1, rank=0, generation=2)) == b"third\n"
        with pytest.raises(ConfigError, match="no replica 2"):
            list(run.logs(replica=2))
        with pytest.raises(ConfigError, match="one process"):
            list(run.log_bytes(replica=1))
    with pytest.raises(sm.RunFailedError, match="boom"):
        sm.status("x").check()


def test_exact_bytes_of_a_live_run_are_exact(start):
    folder, _ = start()
    blob = bytes(range(256)) * 3000
    (folder.path / "raw.bin").write_bytes(blob)
    with sm.attach("x") as run:
        assert b"".join(run.log_bytes(replica=0, rank=0)) == blob


def test_down_ends_a_run_through_its_controller_and_may_be_repeated(start):
    folder, process = start()
    final = sm.down("x", reason="enough")
    assert (final.state, final.exit_code, final.reason) == ("CANCELLED", 8, "enough")
    assert process.wait(20) == 0
    assert not (folder.path / "private.json").exists(), "secrets are dropped at the end"
    assert not folder.api.exists()
    assert sm.down("x") == final
    with pytest.raises(RunCancelledError):
        final.check()


def test_down_ends_a_run_whose_controller_is_silent(start):
    folder, process = start()
    (folder.path / "silent").touch()
    final = sm.down("x", grace_s=20)  # for it to end: it ends at once
    assert final.state == "CANCELLED"
    assert process.wait(20) == -signal.SIGTERM


def test_a_run_whose_agent_was_killed_is_lost_until_down_reaps_what_is_left(start):
    folder, process = start()
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, "SKY_MONARCH_RUN_ID": folder.run_id})
    process.kill()
    process.wait()
    assert sm.status("x").state == "LOST"
    assert [status.state for status in sm.runs()] == ["LOST"]
    final = sm.down("x", grace_s=20)
    assert orphan.wait(20) == -signal.SIGTERM
    assert final.state == "FAILED"
    assert "agent died" in final.reason
    assert sm.runs() == ()


def test_a_pid_that_somebody_else_has_now_is_never_signalled(start):
    folder, process = start()
    process.kill()
    process.wait()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        write_json(folder.path / "agent.pid", {"pid": stranger.pid, "start_ticks": 12})
        assert sm.status("x").state == "LOST"
        sm.down("x", grace_s=0.1)
        assert stranger.poll() is None
        stranger.kill()


def test_names_mean_the_live_run_and_ids_the_one_run(start):
    first, process = start()
    end(first, process, state="SUCCEEDED")
    second, _ = start()
    assert sm.attach("x").run_id == second.run_id
    assert sm.attach(first.run_id).run_id == first.run_id
    with pytest.raises(sm.RunNotFoundError) as caught:
        sm.attach("xy")
    assert "'x'" in caught.value.hint
    assert [status.run_id for status in sm.runs()] == [second.run_id]
    assert [status.run_id for status in sm.runs(ended=True)] == [first.run_id, second.run_id]


def test_wait_returns_once_the_agent_is_gone_too(start):
    folder, process = start()
    with sm.attach("x") as run:
        with pytest.raises(ChannelTimeoutError, match="still going on"):
            run.wait(timeout_s=0.2)
        end(folder, process, state="SUCCEEDED", exit_code=0)
        assert run.wait(timeout_s=20).state == "SUCCEEDED"
    assert not (folder.path / "private.json").exists()


def test_the_asynchronous_sdk_sees_the_same(start):
    folder, _ = start()
    write_events(folder, 1, 2, 3)
    write_logs(folder, (0, "a"), (1, "b"))

    async def scenario():
        async with await sm.aio.attach("x") as run:
            assert (await run.status()).state == "RUNNING"
            assert [event.id async for event in run.events(after=1)] == [2, 3]
            assert [line.line async for line in run.logs(replica=1)] == ["b"]
            following = run.events(after=3, follow=True)
            pending = asyncio.ensure_future(anext(following))
            await asyncio.sleep(0.1)
            assert not pending.done()
            write_events(folder, 4)
            assert (await asyncio.wait_for(pending, 20)).id == 4
            await following.aclose()
            final = await run.down(reason="bye")
            assert final.reason == "bye"
            return (await run.wait(timeout_s=20)).state

    assert asyncio.run(scenario()) == "CANCELLED"


def test_patience_ends_at_once_for_a_run_that_has_ended(start):
    folder, process = start()
    end(folder, process, state="SUCCEEDED")
    assert _api.Patience(folder, limit_s=0.0).delay_s() == 0.0
