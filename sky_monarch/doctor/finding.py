"""One thing that was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

__all__ = ["Finding", "Severity"]


class Severity(Enum):
    """How much it matters."""

    ERROR = "error"
    """Training fails or hangs."""
    WARNING = "warning"
    """Training is slower or less safe than it should be, or may hang."""
    INFO = "info"
    """Worth knowing."""
    OK = "ok"
    """As it should be."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found.

    Attributes:
        check: The check that found it, such as ``kernel.iommu``: stable, for scripts.
        severity: How much it matters.
        message: What is so, and what it does.
        fix: What to do; None where nothing is to be done.
    """

    check: str
    severity: Severity
    message: str
    fix: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """As JSON shows it."""
        return {**asdict(self), "severity": self.severity.value}


def ok(check: str, message: str) -> Finding:
    """All is well."""
    return Finding(check=check, severity=Severity.OK, message=message)


def info(check: str, message: str, fix: str | None = None) -> Finding:
    """Worth knowing."""
    return Finding(check=check, severity=Severity.INFO, message=message, fix=fix)


def warning(check: str, message: str, fix: str) -> Finding:
    """Slower, less safe, or it may hang."""
    return Finding(check=check, severity=Severity.WARNING, message=message, fix=fix)


def error(check: str, message: str, fix: str) -> Finding:
    """It fails or hangs."""
    return Finding(check=check, severity=Severity.ERROR, message=message, fix=fix)
