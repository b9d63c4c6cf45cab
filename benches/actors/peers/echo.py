"""What the actors of all runtimes do."""

from __future__ import annotations

import os
import time
from typing import Any


class Echo:
    """Plain methods; a runtime's module makes endpoints of them."""

    def __init__(self) -> None:
        self._bumps = 0

    def ping(self, value: Any) -> Any:
        """Return what it gets."""
        return value

    def bump(self) -> None:
        """Count one."""
        self._bumps += 1

    def count(self) -> int:
        """How often it was bumped."""
        return self._bumps

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def length(self, payload: Any) -> int:
        """Of a payload."""
        return len(payload)

    def hang(self, seconds: float) -> None:
        """Answer late."""
        time.sleep(seconds)
