"""What pydantic refuses, as the problems of a job that was written in Python."""

from __future__ import annotations

from pydantic import ValidationError

from sky_monarch.config.problem import FieldRefusalError, Problem

__all__ = ["problems_of"]


def problems_of(error: ValidationError) -> list[Problem]:
    """One problem for each thing refused, in the order of the fields; values are not in it but where we say them."""
    problems = []
    for detail in error.errors(include_url=False, include_input=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(
            "."
        )
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, FieldRefusalError):
            problem = Problem(path=path, message=str(cause), suggestion=cause.suggestion, fix=cause.fix)
        elif detail["type"] == "extra_forbidden":
            problem = Problem(path=path, message="unknown field")
        elif detail["type"] == "missing":
            problem = Problem(path=path, message="is missing")
        elif detail["type"] == "value_error":
            problem = Problem(path=path, message=str(cause))
        else:
            problem = Problem(path=path, message=detail["msg"][:1].lower() + detail["msg"][1:])
        problems.append(problem)
    return problems
