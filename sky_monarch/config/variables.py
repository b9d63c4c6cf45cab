"""Reads ``envs`` and ``secrets``: the file's values as typed, and what the command line replaces or adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sky_monarch.config import environment
from sky_monarch.config.document import Path, Scalar, Table, is_null
from sky_monarch.config.problem import FieldRefusalError

__all__ = ["Overrides", "Report", "read_variables"]

Overrides = Mapping[str, str | None]
"""Values by name; None: take it from the caller's environment."""

_OPTIONS = {"envs": "--env", "secrets": "--secret"}


class Report(Protocol):
    """Takes a problem and finds its place in the file."""

    def __call__(
        self,
        path: Path,
        message: str,
        *,
        suggestion: str | None = None,
        fix: str | None = None,
        key: bool = False,
        placed: bool = True,
    ) -> None:
        """Record it; ``key``: point at the key; ``placed``: it has a place in the file."""


def read_variables(
    root: Table, overrides: Mapping[str, Overrides], environ: Mapping[str, str], report: Report
) -> dict[str, dict[str, str]]:
    """Both sections with their final values.

    Args:
        root: The document.
        overrides: By section, ``envs`` and ``secrets``.
        environ: The caller's environment.
        report: Called for everything that is wrong.

    Returns:
        The usable variables by section.
    """
    values: dict[str, dict[str, str]] = {}
    named: dict[str, set[str]] = {}
    for section, given in overrides.items():
        values[section] = _from_file(root, section, given, report)
        values[section].update(_from_options(section, given, environ, report))
        named[section] = {*_names(root, section), *given}
    for name in sorted(named["envs"] & named["secrets"]):
        report(
            ("secrets", name), f"{name} is in envs and in secrets", fix="keep it in one of the two", key=True
        )
    try:
        environment.check_total(*values.values())
    except FieldRefusalError as error:
        report(("envs",), str(error), fix=error.fix, key=True)
    return values


def _names(root: Table, section: str) -> list[str]:
    _, table = root.entries.get(section, (None, None))
    return list(table.entries) if isinstance(table, Table) else []


def _from_file(root: Table, section: str, overrides: Overrides, report: Report) -> dict[str, str]:
    """Variables of the file that no option replaces, each with the literal text of its value."""
    _, table = root.entries.get(section, (None, None))
    if table is None:
        return {}
    if not isinstance(table, Table):
        message = "is empty" if is_null(table) else "must be a mapping of names to values"
        report((section,), message, fix="write one `NAME: value` a line, or leave it out", key=True)
        return {}
    found = {}
    for name, (_, node) in table.entries.items():
        path = (section, name)
        if name in overrides:
            continue
        if is_null(node):
            option = _OPTIONS[section]
            fix = f'give {option} {name} to take it from your environment, or write "" for an empty text'
            report(path, f"{name} has no value", fix=fix, key=True)
        elif not isinstance(node, Scalar):
            report(path, "must be a text", fix=f"put it into quotes: {name}: '...'")
        elif _usable(path, node.text, report, placed=True):
            found[name] = node.text
    return found


def _from_options(
    section: str, overrides: Overrides, environ: Mapping[str, str], report: Report
) -> dict[str, str]:
    found = {}
    option = _OPTIONS[section]
    for name, value in overrides.items():
        taken = environ.get(name) if value is None else value
        if taken is None:
            message, fix = (
                f"{option} {name}: your environment holds no {name}",
                f"export it, or give {name}=VALUE",
            )
            report((section, name), message, fix=fix, placed=False)
        elif _usable((section, name), taken, report, placed=False):
            found[name] = taken
    return found


def _usable(path: tuple[str, str], value: str, report: Report, *, placed: bool) -> bool:
    on_key = True
    try:
        environment.check_name(path[1])
        on_key = False
        environment.check_value(path[1], value)
    except FieldRefusalError as error:
        report(path, str(error), suggestion=error.suggestion, fix=error.fix, key=on_key, placed=placed)
        return False
    return True
