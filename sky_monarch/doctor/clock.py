"""Whether the host's clock is kept right: certificates of a run, object stores and logs of several hosts go by it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sky_monarch.doctor.finding import Finding, info, ok, warning
from sky_monarch.doctor.tree import Tree

__all__ = ["ADJTIMEX", "CHRONY", "check"]

CHRONY = "chronyc -n tracking"
ADJTIMEX = "adjtimex"
"""``<state> <status> <most it may be wrong, in microseconds>``, as the kernel says it."""

_TIME_ERROR, _UNSYNCHRONISED = 5, 0x40
_FAR_S = 1.0
_FIX = "run chrony or systemd-timesyncd (`timedatectl set-ntp true`); in a virtual machine, the guest tools of its host"


def check(tree: Tree, tools: Mapping[str, str]) -> Iterator[Finding]:
    """By the word of chrony, else of the kernel, else of timesyncd."""
    off = _chrony(tools.get(CHRONY, ""))
    kernel = re.fullmatch(r"(-?\d+) (\d+) (\d+)", tools.get(ADJTIMEX, "").strip())
    if isinstance(off, float) and off >= _FAR_S:
        yield warning("host.clock", f"the clock is {off:.1f} s off, chrony says", _FIX)
    elif isinstance(off, float):
        yield ok("host.clock", f"chrony keeps the clock within {off * 1e3:.3g} ms")
    elif off is not None:
        yield warning("host.clock", f"chrony runs and has no time to go by ({off})", _FIX)
    elif tree.exists("run/systemd/timesync/synchronized"):
        yield ok("host.clock", "systemd-timesyncd keeps the clock")
    elif kernel is None:
        yield info("host.clock", "whether the clock is kept right cannot be seen here")
    elif int(kernel[1]) == _TIME_ERROR or int(kernel[2]) & _UNSYNCHRONISED:
        yield info(
            "host.clock",
            "nothing on this host keeps the clock (a container's host may): run certificates and object stores refuse "
            "hosts that are minutes off",
            _FIX,
        )
    elif int(kernel[3]) / 1e6 >= _FAR_S:
        yield warning(
            "host.clock", f"the clock may be {int(kernel[3]) / 1e6:.1f} s off, the kernel says", _FIX
        )
    else:
        yield ok("host.clock", f"the clock is kept within {int(kernel[3]) / 1e3:.3g} ms")


def _chrony(text: str) -> float | str | None:
    """Seconds that the clock is off; why that is not known; None without chrony."""
    lines: dict[str, str] = dict(re.findall(r"^([\w ]+?)\s*:\s*(.+)$", text, re.MULTILINE))
    if not lines:
        return None
    if (leap := lines.get("Leap status", "Normal")) == "Not synchronised":
        return leap
    match = re.match(r"([\d.]+) seconds", lines.get("System time", ""))
    return float(match[1]) if match else "it says no time"
