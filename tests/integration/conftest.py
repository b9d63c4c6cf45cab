"""Fixtures of the tests of actors, and of those of a controller alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sky_monarch.actor import MeshFailure
    from tests.support.controllers import ControllerRun, ScriptedAgent
    from tests.support.shown import Shown


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
def shown() -> Shown:
    """What the program of the test shows on its stderr, to be looked at while it goes on."""
    from tests.support.shown import Shown

    return Shown()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Have it shown there: not from the fixture on, as pytest puts its own stderr in place before the test."""
    stream = pyfuncitem.funcargs.get("shown")
    with pytest.MonkeyPatch.context() as patch:
        if stream is not None:
            patch.setattr("sys.stderr", stream)
        return (yield)


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
