"""What ranks on other hosts have printed stays, when their hosts do not. All processes are real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tarfile
from pathlib import Path

import pytest

from sky_monarch.launch.folder import RunFolder
from sky_monarch.launch.process import carrying
from tests.support.processes import send
from tests.support.runs import Workbench
from tests.support.waiting import eventually

# Prints what it is told, and then a word whenever there is a new file `say-<word>`; ends at `go`.
TALKER = r"""
import os, sys, time
from pathlib import Path
here, who = Path(os.environ["HERE"]), os.environ["REPLICA_GROUP_ID"] + "." + os.environ["SKY_MONARCH_GENERATION"]
print("born", who, "of", os.environ["KEY"], flush=True)
said = set()
flood = int(os.environ.get("FLOOD", "0"))
if flood and who.startswith("0."):
    line = b"x" * 1023 + b"\n"
    began = time.monotonic()
    for _ in range(flood):
        os.write(1, line * 1024)
    took = time.monotonic() - began
    (here / "took").write_text(str(took))
    print("flooded", flush=True)
while not (here / "go").exists():
    for path in here.glob("say-*"):
        if path.name not in said:
            said.add(path.name)
            print(who, path.name[4:], flush=True)
    time.sleep(0.05)
print("bye", who, flush=True)
"""
CANARY = "canary-archive-2231"


def start(bench: Workbench, name: str, *, env: dict[str, str] | None = None, **fields) -> RunFolder:
    script = bench.folder / "talker.py"
    script.write_text(TALKER)
    envs = {"HERE": str(bench.folder), **(env or {})}
    job = bench.job(
        name,
        run=f"{sys.executable} {script}",
        replicas=2,
        envs=envs,
        secrets={"KEY": CANARY},
        **fields,
    )
    bench.up(job, "--hosts", "2")
    return bench.folder_of(name)


def kill_host(folder: RunFolder, life: str) -> None:
    """As a machine that is switched off, disk and all."""
    place = folder.path / "hosts" / life
    os.killpg(json.loads((place / "process.json").read_text())["pid"], signal.SIGKILL)
    (place / "logs").rename(place / "unreachable")


def lines(bench: Workbench, name: str, *arguments: str) -> list[dict]:
    done = bench.cli("logs", name, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def texts(bench: Workbench, name: str, *arguments: str) -> list[str]:
    return [line["line"] for line in lines(bench, name, *arguments)]


def archived(folder: RunFolder, replica: int) -> bytes:
    """What the run's own folder has of rank 0 of a group."""
    found = []
    for path in sorted((folder.path / "logs" / f"r{replica}-0").glob("g*.log")):
        with contextlib.suppress(FileNotFoundError):  # rotated away meanwhile
            found.append(path.read_bytes())
    return b"".join(found)


def last_words(folder: RunFolder, replica: int) -> bytes:
    """The end of that."""
    newest = max((folder.path / "logs" / f"r{replica}-0").glob("g*.log"), default=None)
    return b"" if newest is None else newest.read_bytes()[-100:]


def test_what_a_lost_host_printed_is_told_and_so_it_is_after_the_end(workbench: Workbench) -> None:
    folder = start(workbench, "kept", setup="echo prepared")
    (workbench.folder / "say-before").touch()
    eventually(
        lambda: b"1.1 before" in archived(folder, 1), within_s=30, what="it is kept while it is printed"
    )
    assert (folder.path / "logs" / "r1-0").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (folder.path / "logs").glob("*/*.log"))

    kill_host(folder, "kept-h1-a1")
    eventually(
        lambda: b"born 1.1" in archived(folder, 1) and archived(folder, 1).count(b"born") == 2, within_s=60
    )
    found = lines(workbench, "kept", "--replica", "1")
    assert [line["line"] for line in found][:2] == [f"born 1.1 of {CANARY}", "1.1 before"]
    second = {line["generation"] for line in found} - {1}
    assert len(second) == 1, "each life has lines of its own"
    assert texts(workbench, "kept", "--replica", "1", "--generation", "1") == [
        f"born 1.1 of {CANARY}",
        "1.1 before",
    ]
    exact = workbench.cli("logs", "kept", "--replica", "1", "--rank", "0", "--generation", "1").stdout
    assert exact == f"born 1.1 of {CANARY}\n1.1 before\n"
    assert texts(workbench, "kept", "--replica", "1", "--tail", "1", "--generation", "1") == ["1.1 before"]

    assert workbench.cli("logs", "kept", "--setup").stdout.splitlines().count("[setup] prepared") == 3
    (workbench.folder / "say-last").touch()
    eventually(lambda: f"1.{next(iter(second))} last" in texts(workbench, "kept"), within_s=20)
    done = workbench.cli("down", "kept", "--grace", "2")
    assert done.returncode == 0, done.stderr
    after = texts(workbench, "kept")
    assert after.count("0.1 last") == 1
    assert after[:3] == [f"born 0.1 of {CANARY}", "0.1 before", "0.1 last"], after
    assert after[3:5] == [f"born 1.1 of {CANARY}", "1.1 before"], after

    assert texts(workbench, "kept", "--setup") == ["prepared"] * 3, "of each attempt at each host"

    bundle = workbench.folder / "bundle.tar.gz"
    assert workbench.cli("debug-bundle", "kept", "-o", str(bundle)).returncode == 0
    with tarfile.open(bundle) as tar:
        file = tar.extractfile("logs/r1-0/g1.log")
        assert file is not None
        data = file.read()
    assert b"1.1 before" in data
    assert CANARY.encode() not in data, "secrets are taken out there, as everywhere"


def test_of_a_flood_the_newest_is_kept_the_rest_is_counted_and_others_lose_nothing(
    workbench: Workbench,
) -> None:
    folder = start(workbench, "flood", env={"FLOOD": "100"}, logs={"archive_mib": 8})
    eventually(lambda: last_words(folder, 0).endswith(b"flooded\n"), within_s=90, what="the newest is kept")
    (workbench.folder / "say-quiet").touch()
    eventually(lambda: b"1.1 quiet" in archived(folder, 1), within_s=20)
    status = workbench.status("flood")
    kept, dropped = status["output"]["kept_bytes"], status["output"]["dropped_bytes"]
    assert kept <= 8 << 20, "the limit holds"
    on_disk = sum(path.stat().st_size for path in (folder.path / "logs").glob("*/*.log"))
    assert on_disk <= 8 << 20
    assert 100 << 20 <= kept + dropped <= (100 << 20) + 1000, "not a byte is unaccounted for"
    assert b"born 1.1" in archived(folder, 1), "who prints little loses nothing"
    notices = [event for event in workbench.events("flood") if event["event"] == "notice"]
    assert any("rank 0 of replica group 0 has printed more than is kept" in one["message"] for one in notices)

    (workbench.folder / "go").touch()
    workbench.wait_for_end("flood")
    found = lines(workbench, "flood", "--replica", "0")
    (gap,) = [line for line in found if line.get("missing_bytes")]
    assert gap is found[0]
    assert re.fullmatch(r"\.\.\. \d+ bytes that were printed here are not kept any more \.\.\.", gap["line"])
    assert found[-1]["line"] == "bye 0.1"
    exact = workbench.cli("logs", "flood", "--replica", "0", "--rank", "0")
    assert "output are not kept any more" in exact.stderr


def test_a_controller_that_dies_goes_on_where_it_was(workbench: Workbench) -> None:
    folder = start(workbench, "again")
    (workbench.folder / "say-one").touch()
    eventually(lambda: b"1.1 one" in archived(folder, 1), within_s=30)
    pid = workbench.status("again")["controller_pid"]
    send((pid,), signal.SIGKILL)
    (workbench.folder / "say-two").touch()
    eventually(lambda: b"1.1 two" in archived(folder, 1), within_s=30)
    kill_host(folder, "again-h1-a1")
    eventually(lambda: archived(folder, 1).count(b"born") == 2, within_s=60)
    expected = f"born 1.1 of {CANARY}\n1.1 one\n1.1 two\n"
    assert archived(folder, 1).startswith(expected.encode()), "nothing twice, nothing missing"
    workbench.down("again")
    exact = workbench.cli("logs", "again", "--replica", "1", "--rank", "0", "--generation", "1").stdout
    assert exact == expected


@pytest.mark.slow
def test_the_output_comes_home_before_a_head_that_is_a_cluster_goes(workbench: Workbench) -> None:
    folder = start(workbench, "home", head="cluster")
    (workbench.folder / "say-far").touch()
    eventually(lambda: {"0.1 far", "1.1 far"} <= set(texts(workbench, "home")), within_s=60)
    assert not (folder.path / "logs").exists(), "it is with the head"
    bundle = workbench.folder / "live.tar.gz"
    assert workbench.cli("debug-bundle", "home", "-o", str(bundle)).returncode == 0
    with tarfile.open(bundle) as tar:
        file = tar.extractfile("logs/r1-0/g1.log")
        assert file is not None
        data = file.read()
    assert b"1.1 far" in data
    assert CANARY.encode() not in data

    done = workbench.cli("down", "home", "--grace", "2")

    assert done.returncode == 0, done.stderr
    assert carrying(folder.run_id) == []
    for life in ("home-h0-a1", "home-h1-a1", "home-head-a1"):
        assert (folder.path / "hosts" / life).is_dir()
        logs = folder.path / "hosts" / life / "logs"
        if logs.exists():
            logs.rename(logs.with_name("unreachable"))
    found = texts(workbench, "home")
    assert [line for line in found if line.endswith("far")] == ["0.1 far", "1.1 far"], "it came home"
    assert workbench.cli("logs", "home", "--replica", "1", "--rank", "0").stdout.startswith("born 1.1 of ")
    status = workbench.status("home")
    on_disk = sum(path.stat().st_size for path in (folder.path / "logs").glob("*/*.log"))
    assert status["output"] == {"kept_bytes": on_disk, "dropped_bytes": 0}
    assert not list(Path(folder.path).rglob("private.json"))
