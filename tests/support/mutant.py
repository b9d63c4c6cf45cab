"""One step of recovery that is left out, and the test that it turns red."""

from __future__ import annotations

from dataclasses import dataclass

HERE = "tests/integration/"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect, and the test that has to notice it.

    Attributes:
        test: Of pytest, with its path.
        words: What the test then says.
        point: A step of the Rust core that is left out: ``mutant::is_on("…")`` there.
        module: Or a module of the package in which ``old`` is replaced by ``new``.
        always: Whether ``make test`` runs it: one for each kind of process that may die. The others are for
            ``make test-mutants``.
    """

    test: str
    words: str
    point: str = ""
    module: str = ""
    old: str = ""
    new: str = ""
    always: bool = False

    @property
    def file(self) -> str:
        """Where the test stands."""
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The test function, without the parameters of one case."""
        return self.test.partition("[")[0]

    def __str__(self) -> str:
        return f"{self.point or self.module}-{self.test.partition('::')[2]}"


def left_out(point: str, test: str, words: str, *, always: bool = False) -> Mutant:
    """A step of the core, by name."""
    return Mutant(HERE + test, words, point=point, always=always)


def replaced(module: str, old: str, new: str, test: str, words: str, *, always: bool = False) -> Mutant:
    """A piece of a module."""
    return Mutant(HERE + test, words, module=module, old=old, new=new, always=always)
