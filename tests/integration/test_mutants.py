"""The tests of recovery can fail: with a step left out they turn red. One for each kind of process that dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.defects import Done, all_run, assert_red, build_core
from tests.support.mutant import Mutant, left_out
from tests.support.mutants import KILLED, MUTANTS

pytestmark = pytest.mark.timeout(300)

ALWAYS = [mutant for mutant in MUTANTS if mutant.always]
# Chooses a step that does not exist.
NONE = replace(left_out("none", KILLED, ""), always=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Mutant, Future[Done]]]:
    folder = tmp_path_factory.mktemp("mutants")  # here: pytest's own way is not for threads
    with all_run([NONE, *ALWAYS], build_core(), lambda: Path(mkdtemp(dir=folder)), at_once=3) as running:
        yield running


def test_without_a_defect_that_build_passes(running: dict[Mutant, Future[Done]]) -> None:
    done = running[NONE].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", ALWAYS, ids=str)
def test_the_defect_turns_its_test_red(running: dict[Mutant, Future[Done]], mutant: Mutant) -> None:
    assert_red(mutant, running[mutant].result())
