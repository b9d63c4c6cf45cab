"""Runs every bench, or those named: `python -m benches [cli_start death_event …]`."""

from __future__ import annotations

import importlib
import sys

BENCHES = ("cli_start", "death_event")


def main() -> int:
    """Run the benches named on the command line (all by default); the first failure ends the run."""
    names = sys.argv[1:] or BENCHES
    unknown = set(names) - set(BENCHES)
    if unknown:
        print(
            f"error: no bench named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}",
            file=sys.stderr,
        )
        return 2
    for name in names:
        importlib.import_module(f"benches.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
