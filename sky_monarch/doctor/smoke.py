"""The part of the doctor that each host of a run sees before its first step: ``python -m sky_monarch.doctor.smoke``.

Its agent starts it, bounds it, and tells the controller what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sky_monarch.doctor import clock, limits, probe
from sky_monarch.doctor.examine import Examination, Situation, examine
from sky_monarch.doctor.finding import Finding, Severity
from sky_monarch.doctor.tree import root_of
from sky_monarch.doctor.wanted import Wanted, needs

__all__ = ["main", "smoke"]

_DEVICES_LIMIT_S = 30.0


def smoke(root: Path, *, devices: bool, wanted: Wanted | None = None) -> Examination:
    """Look at a host.

    Args:
        root: ``/`` for this one.
        devices: Whether its devices are used: else only what every job needs is looked at, and nothing is loaded.
        wanted: The devices that its groups need.
    """
    measured = limits.measure(root)
    if not devices:
        clock_says = {clock.ADJTIMEX: probe.adjtimex()}
        return examine(Situation(root=root, limits=measured, tools=clock_says, bare=True))
    found = examine(
        Situation(
            root=root,
            env=os.environ,
            limits=measured,
            report=probe.probe(limit_s=_DEVICES_LIMIT_S),
            tools=probe.tools(),
            torch_hip=probe.torch_hip(),
            wanted=wanted,
        )
    )
    return replace(found, findings=tuple(map(_early, found.findings)))


def _early(finding: Finding) -> Finding:
    """What the job's own interpreter, or its ``setup``, may still bring is not held against a host."""
    if finding.check.startswith(("library.", "torch.")) and finding.severity is Severity.ERROR:
        return replace(finding, severity=Severity.WARNING)
    return finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at this host, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m sky_monarch.doctor.smoke", description=__doc__)
    parser.add_argument("--host", required=True, help="its name and attempt")
    parser.add_argument("--devices", action="store_true", help="its devices are used")
    parser.add_argument("--need", type=int, default=0, metavar="N", help="so many of them, at least")
    parser.add_argument("--kinds", default="", metavar="A,B", help="of these models")
    parser.add_argument("--groups", type=int, default=1, metavar="N", help="replica groups that share them")
    parser.add_argument("--out", required=True, type=Path, help="file for what is found")
    told = parser.parse_args(arguments)
    wanted = None
    if told.need > 0:
        kinds = tuple(kind for kind in told.kinds.split(",") if kind)
        wanted = Wanted(devices=told.need, models=kinds, why=needs(told.groups))
    found = smoke(root_of(told.host, os.environ), devices=told.devices, wanted=wanted)
    draft = told.out.with_name(f".{told.out.name}.{os.getpid()}")
    draft.write_text(json.dumps(found.to_json()), encoding="utf-8")
    draft.replace(told.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
