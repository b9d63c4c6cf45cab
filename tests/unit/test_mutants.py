"""Each test of a recovery is turned red by something, or says why by nothing."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

from tests.support.mutant import HERE
from tests.support.mutants import MUTANTS
from tests.support.mutants_page import PAGE, page
from tests.support.unmutated import FILES, WITHOUT

ROOT = Path(__file__).parents[2]


# A test that does one of these is one of a recovery, in whatever file.
DISTURBS = re.compile(r"SIGKILL|SIGSTOP|\.kill\(|--inject|die_in|die_at")


@functools.cache
def functions(file: str) -> dict[str, str]:
    """The tests of a file, and their source."""
    text = (ROOT / file).read_text()
    return {
        f"{file}::{one.name}": ast.get_source_segment(text, one) or ""
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
    }


def test_each_test_of_a_recovery_has_a_mutant_or_a_reason() -> None:
    covered = {mutant.function for mutant in MUTANTS}
    excused = {HERE + test for test in WITHOUT}
    every, wanted = {name for mutant in MUTANTS for name in functions(mutant.file)}, set()
    for path in (ROOT / HERE).glob("test_*.py"):
        tests = functions(HERE + path.name)
        every |= set(tests)
        wanted |= {name for name, text in tests.items() if path.name in FILES or DISTURBS.search(text)}
    assert wanted - covered - excused == set(), (
        "add a row to tests/support/mutants.py, or a reason to unmutated.py"
    )
    assert excused & covered == set(), "it has a mutant: the reason is out of date"
    assert excused - every == set(), "no such test"
    assert covered - every == set(), "no such test"
    for why in WITHOUT.values():
        for other in re.findall(r"test_\w+", why):
            assert any(name.endswith(f"::{other}") for name in every), why


def test_each_mutant_has_one_defect_that_can_be_found_and_words() -> None:
    core = "".join(path.read_text() for path in (ROOT / "rust_core/src").rglob("*.rs"))
    for mutant in MUTANTS:
        assert mutant.words, mutant
        assert bool(mutant.point) != bool(mutant.module), mutant
        if mutant.point:
            assert f'is_on("{mutant.point}")' in core, mutant
        else:
            assert (ROOT / "sky_monarch" / mutant.module).read_text().count(mutant.old) == 1, mutant
    assert [row for row, count in Counter(map(str, MUTANTS)).items() if count > 1] == []


def test_what_make_test_leaves_out_is_little_of_each_mechanism() -> None:
    always = [mutant for mutant in MUTANTS if mutant.always]
    assert 5 <= len(always) <= 6, "make test has ten minutes"


def test_the_page_lists_them_all() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.mutants_page"
