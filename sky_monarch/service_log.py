"""The log of a service of the head: JSON lines on standard error."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO, cast

import structlog


class _Stderr:
    """Standard error, which may be a file on a full disk: what cannot be said is not worth a service."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))

    def flush(self) -> None:
        pass


def configure_log() -> None:
    """Let structlog write a JSON line with level, time (ISO 8601, UTC) and traceback to standard error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Stderr())),
    )
