"""Fixtures of all tests, and the checks that they leave nothing behind."""

from __future__ import annotations

import compileall
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import environ_of, is_alive, pids
from tests.support.runs import ROOT, Workbench
from tests.support.waiting import PATIENCE, eventually
from tests.support.zygote import Zygote

BEFORE = pytest.StashKey[set[str]]()

# What pytest makes of the tests themselves is kept, too: four workers read them all. A test of a defect sees them
# through links, by names that are soon gone.
if "SKY_MONARCH_TEST_PATIENCE" not in os.environ:
    sys.dont_write_bytecode = False


def _leavings() -> set[str]:
    """Shared memory, and socket folders of runs. A session beside others has only a temp folder of its own."""
    folders = [Path(tempfile.gettempdir())]
    if "SKY_MONARCH_TEST_BESIDE" not in os.environ:
        folders.append(Path("/dev/shm"))
    entries = {str(entry) for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    return {entry for entry in entries if entry.startswith("/dev/shm") or "sky-monarch" in entry}


def _processes_of(folder: Path) -> list[int]:
    """Live processes of runs whose state folder is ``folder``."""
    return [
        pid
        for pid in pids()
        if environ_of(pid).get("SKY_MONARCH_STATE_DIR") == str(folder)
        and is_alive(pid)
        and pid != os.getpid()
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember what was there before the first test, and compile what tests start, thousands of times, once."""
    session.config.stash[BEFORE] = _leavings()
    if sys.flags.dont_write_bytecode and not hasattr(session.config, "workerinput"):
        for folder in ("sky_monarch", "tests", "examples"):
            compileall.compile_dir(ROOT / folder, quiet=2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the slow tests ``SKY_MONARCH_TEST_SHARE=k/n`` leaves every n-th, from the k-th on: for a landing."""
    first, stride = (int(part) for part in os.environ.get("SKY_MONARCH_TEST_SHARE", "0/1").split("/"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = set(slow) - set(slow[first % stride :: stride])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the whole session, workers included, where shared memory or socket folders are left."""
    # With a defect it may leave anything; and beside others, which start that session, it sees what is theirs.
    if hasattr(session.config, "workerinput") or PATIENCE < 1:
        return
    # Who tidies up after a killed program does so a moment after its end, which may be that of the last test.
    deadline = time.monotonic() + 10
    while left := _leavings() - session.config.stash[BEFORE]:
        if time.monotonic() > deadline:
            print(f"\nerror: the tests left behind: {', '.join(sorted(left))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        time.sleep(0.1)


def _short_folder() -> Iterator[Path]:
    """A fresh folder with a short name: pytest's own, in a worker, is too long for a Unix socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="smt-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


tmp_path = pytest.fixture(_short_folder, name="tmp_path")
module_path = pytest.fixture(_short_folder, name="module_path", scope="module")


@pytest.fixture
def workbench(tmp_path: Path) -> Iterator[Workbench]:
    """A state folder of its own; afterwards no process of it may be left."""
    bench = Workbench(tmp_path)
    yield bench
    bench.close()
    assert eventually(lambda: not _processes_of(bench.home), within_s=10, what="its processes end")


@pytest.fixture(scope="session")
def zygote_of_all() -> Iterator[Zygote]:
    """What forks ranks that need torch: torch is imported once for all tests of this process."""
    with tempfile.TemporaryDirectory(prefix="smt-") as folder:
        zygote = Zygote(Path(folder))
        yield zygote
        zygote.close()


@pytest.fixture(scope="module")
def zygote(zygote_of_all: Zygote) -> Iterator[Zygote]:
    """The same, with nothing in it of the tests before these."""
    zygote_of_all.begin()
    yield zygote_of_all
    zygote_of_all.end_children()
