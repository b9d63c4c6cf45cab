"""Fixtures of the tests of actors, and of those of a controller alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sky_monarch.actor import MeshFailure
    from tests.support.controllers import ControllerRun, ScriptedAgent


@pytest.fixture
def actors_end() -> Iterator[None]:
    """End all actors of this process after the test."""
    from sky_monarch.actor import shutdown

    yield
    shutdown()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What nobody has handled, in place of the end of this process."""
    seen: list[MeshFailure] = []
    monkeypatch.setattr("sky_monarch.actor.unhandled_fault_hook", seen.append)
    return seen


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ControllerRun]:
    """A controller of a run, without agents."""
    from tests.support.controllers import controller

    with controller(tmp_path) as started:
        yield started


@pytest.fixture
def agent(run: ControllerRun) -> Iterator[ScriptedAgent]:
    """An agent of that run that does what its test says."""
    from tests.support.controllers import ScriptedAgent

    connected = ScriptedAgent(run).connect()
    yield connected
    connected.close()
