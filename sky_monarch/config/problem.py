"""What can be wrong with a job file, and the error that carries all of it.

Nothing here needs pydantic, so that the CLI may import it cheaply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sky_monarch.errors import ConfigError

__all__ = ["FieldRefusalError", "JobFileError", "Position", "Problem", "problems_as_json", "sort_problems"]

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a job file; both count from 1. Columns count characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong (or worth knowing) in a job file.

    Attributes:
        path: Field, such as ``resources.any_of[1].use_spot``; empty where the file as a whole is meant.
        message: One sentence without the path, such as ``must be at least 1, not 0``.
        line: Line in the file, from 1; None where the value came from elsewhere (an option, Python).
        column: Column in that line, from 1; None together with ``line``.
        suggestion: The field or value that was probably meant.
        fix: What to write instead, or what to do.
        severity: ``error`` refuses the job, ``warning`` does not.
    """

    path: str
    message: str
    line: int | None = None
    column: int | None = None
    suggestion: str | None = None
    fix: str | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        """One line for people: place, field, message, suggestion, fix."""
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{place}{self._said}"

    def placed(self, source: str) -> str:
        """The same with the file, as compilers say it: ``job.yaml:3: replicas: …``."""
        place = source if self.line is None else f"{source}:{self.line}"
        return f"{place}: {self._said}"

    @property
    def _said(self) -> str:
        field = f"{self.path}: " if self.path else ""
        meant = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{field}{self.message}{meant}{fix}"


class JobFileError(ConfigError):
    """A job file cannot be used. All its problems are in here, in the order of their lines.

    Attributes:
        source: Path of the file, or ``<text>``.
        problems: At least one, warnings included.
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems: tuple[Problem, ...] = tuple(problems)
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if len(errors) == 1:
            message = f"{source}: {errors[0]}"
        else:
            message = f"{source} has {len(errors)} problems\n" + "\n".join(f"  {error}" for error in errors)
        super().__init__(message)


class FieldRefusalError(ValueError):
    """A value that its field does not take; validators raise it, the loader adds path and position."""

    def __init__(self, message: str, *, suggestion: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion
        self.fix = fix


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Order by line and column; what has no line comes last. Equal problems are named once."""
    unique = dict.fromkeys(problems)
    return sorted(unique, key=lambda problem: (problem.line is None, problem.line or 0, problem.column or 0))


def problems_as_json(problems: Iterable[Problem]) -> list[dict[str, str | int | None]]:
    """Problems as ``validate --json`` prints them.

    Returns:
        One ``{path, message, line, column, suggestion, fix, severity}`` each, in the order given.
    """
    return [asdict(problem) for problem in problems]
