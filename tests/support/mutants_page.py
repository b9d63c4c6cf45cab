"""Writes ``tests/MUTANTS.md``: which step left out turns which test red."""

from __future__ import annotations

from pathlib import Path

from tests.support.mutant import HERE, Mutant
from tests.support.mutants import MUTANTS
from tests.support.unmutated import WITHOUT

PAGE = Path(__file__).parents[1] / "MUTANTS.md"
_HEAD = """# Mutants

Written by `python -m tests.support.mutants_page` from `support/mutants*.py` and
`support/unmutated.py`. Tests without a folder are those of `integration/`;
`make test` runs the mutants with a star, `make test-mutants` the others.

| Test | What is left out, or replaced | |
|---|---|---|
"""
_WITHOUT = """
Without a mutant:

| Test | Why |
|---|---|
"""


def _code(text: str) -> str:
    """On one line, in a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line else "nothing"


def _defect(mutant: Mutant) -> str:
    if mutant.point:
        return _code(mutant.point)
    return f"`{mutant.module}`: {_code(mutant.old)} by {_code(mutant.new)}"


def page() -> str:
    """The page as it should be."""
    rows = [
        f"| `{mutant.test.removeprefix(HERE)}` | {_defect(mutant)} | {'*' if mutant.always else ''} |\n"
        for mutant in sorted(MUTANTS, key=lambda mutant: (mutant.test, str(mutant)))
    ]
    reasons = [f"| `{test}` | {why} |\n" for test, why in sorted(WITHOUT.items())]
    return _HEAD + "".join(rows) + _WITHOUT + "".join(reasons)


if __name__ == "__main__":
    PAGE.write_text(page())
