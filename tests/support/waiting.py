"""The one way in which a test waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# The mutant tests wait for what will not come: they shorten every wait.
PATIENCE = float(os.environ.get("SKY_MONARCH_TEST_PATIENCE", "1"))


class HopelessError(Exception):
    """What a probe raises where waiting longer cannot help."""


def eventually(
    probe: Callable[[], T],
    *,
    within_s: float = 20.0,
    every_s: float = 0.02,
    what: str = "",
    comes_always: bool = False,
) -> T:
    """Call ``probe`` until it returns something true, and return that.

    An ``AssertionError`` of the probe counts as "not yet"; the last one is shown when time runs out. What
    ``comes_always`` happens before anything goes wrong, whatever is defect: that wait is never shortened.
    """
    deadline = time.monotonic() + within_s * (1 if comes_always else PATIENCE)
    last: object = None
    while True:
        try:
            value = probe()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s} s: {what or probe!r}; last: {last!r}")
        time.sleep(every_s)
