"""What becomes of a mesh of processes when one of them ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from sky_monarch.errors import ConfigError

__all__ = ["RestartPolicy"]

Kind = Literal["one_for_one", "one_for_all", "rest_for_one"]
_KINDS = ("one_for_one", "one_for_all", "rest_for_one")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Which ranks are replaced when one ends, and how often at the most.

    Attributes:
        kind: ``one_for_one`` replaces the rank that ended, ``one_for_all`` every rank, ``rest_for_one`` it and those
            after it.
        intensity: Ends within ``window_s`` that are dealt with so; one more goes to the owner.
        window_s: Seconds.

    Raises:
        ConfigError: A value cannot be used.
    """

    kind: Kind = "one_for_one"
    intensity: int = 3
    window_s: float = 60.0
    _ends: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"{self.kind!r} is no kind of restart", hint=f"one of {', '.join(_KINDS)}")
        if self.intensity < 1 or not self.window_s > 0:
            raise ConfigError("intensity is 1 or more, window_s more than 0")

    def allows(self) -> bool:
        """Count an end; False where there were too many."""
        now = time.monotonic()
        self._ends[:] = [end for end in self._ends if now - end < self.window_s]
        if len(self._ends) >= self.intensity:
            return False
        self._ends.append(now)
        return True

    def ranks(self, ended: int, size: int) -> list[int]:
        """Who is to be replaced, of ``size`` ranks, when ``ended`` has ended."""
        if self.kind == "one_for_one":
            return [ended]
        return list(range(size)) if self.kind == "one_for_all" else list(range(ended, size))
