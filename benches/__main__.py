"""Runs every bench, or those named: `python -m benches [cli_start death_event …]`.

All take more than an hour. What follows the name of a single bench and begins with a dash is for that bench:
`python -m benches recovery --help`.
"""

from __future__ import annotations

import importlib
import itertools
import sys

BENCHES = (
    "actor_hosts",
    "actors",
    "chaos",
    "checkpoint",
    "cli_start",
    "controller",
    "death_event",
    "instructions",
    "launch",
    "lighthouse",
    "overhead",
    "policy",
    "provision",
    "recovery",
    "transfer",
)
_WITH_OPTIONS = {"actors", "chaos", "launch", "overhead", "recovery", "transfer"}
_INTERRUPTED = 130


def main() -> int:
    """Run the benches named on the command line (all by default); the first failure ends the run."""
    arguments = sys.argv[1:]
    given = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = arguments[len(given) :]
    names = given or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        print(
            f"error: no bench named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}",
            file=sys.stderr,
        )
        return 2
    if options and (len(given) != 1 or given[0] not in _WITH_OPTIONS):
        having = ", ".join(sorted(_WITH_OPTIONS))
        print(f"error: only a single bench that has options takes some: {having}", file=sys.stderr)
        return 2
    for name in names:
        try:
            code = importlib.import_module(f"benches.{name}").run(*([options] if options else []))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED
        if code:
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
