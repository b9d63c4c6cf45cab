"""What free ranks print of their steps."""

from __future__ import annotations

import re
from itertools import pairwise


def longest_gap_s(log: str) -> float:
    """Longest time between two steps that a free rank has printed."""
    times = [float(found) for found in re.findall(r"step \d+ at ([\d.]+)", log)]
    return max(after - before for before, after in pairwise(times))
