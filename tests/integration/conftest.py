"""Fixtures of the tests of actors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sky_monarch.actor import MeshFailure


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
