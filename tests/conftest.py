"""Fixtures of all tests, and the check that a test leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import environ_of, is_alive, pids
from tests.support.runs import Workbench
from tests.support.waiting import eventually


def _shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def _of_state_folder(folder: Path) -> list[int]:
    return [
        pid
        for pid in pids()
        if environ_of(pid).get("SKY_MONARCH_STATE_DIR") == str(folder)
        and is_alive(pid)
        and pid != os.getpid()
    ]


@pytest.fixture
def workbench(tmp_path: Path) -> Iterator[Workbench]:
    """A state folder of its own; afterwards no process, shared memory or socket folder of it may be left."""
    shared_before = _shared_memory()
    bench = Workbench(tmp_path)
    yield bench
    bench.close()
    left = eventually(lambda: not _of_state_folder(bench.home) or None, within_s=10, what="processes end")
    assert left
    assert _shared_memory() <= shared_before, "shared memory was left behind"
