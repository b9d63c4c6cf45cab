"""Every mutant that `make test` leaves out. Slow: `make test-mutants`.

``SKY_MONARCH_TEST_SHARE=k/n`` runs every n-th of them, from the k-th on: what one landing has time for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.defects import Done, all_run, assert_red, build_core
from tests.support.mutant import Mutant
from tests.support.mutants import MUTANTS

FIRST, STRIDE = (int(part) for part in os.environ.get("SKY_MONARCH_TEST_SHARE", "0/1").split("/"))
REST = [mutant for mutant in MUTANTS if not mutant.always][FIRST % STRIDE :: STRIDE]


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Mutant, Future[Done]]]:
    chosen = [item.callspec.params["mutant"] for item in request.session.items if hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("mutants")  # here: pytest's own way is not for threads
    with all_run(chosen, build_core(), lambda: Path(mkdtemp(dir=folder)), at_once=6) as running:
        yield running


@pytest.mark.mutant
@pytest.mark.timeout(1800)  # the first one waits for all that run before it
@pytest.mark.parametrize("mutant", REST, ids=str)
def test_the_defect_turns_its_test_red(running: dict[Mutant, Future[Done]], mutant: Mutant) -> None:
    assert_red(mutant, running[mutant].result())
