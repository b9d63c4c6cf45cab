"""Runs every bench, or those named: `python -m benches [cli_start death_event …]`.

What follows the name of a single bench and begins with a dash is for that bench: `python -m benches recovery --help`.
"""

from __future__ import annotations

import importlib
import itertools
import sys

BENCHES = ("checkpoint", "cli_start", "controller", "death_event", "lighthouse", "policy", "recovery")


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
    if options and given != ["recovery"]:
        print("error: only a single bench that has options takes some: recovery", file=sys.stderr)
        return 2
    for name in names:
        code = importlib.import_module(f"benches.{name}").run(*([options] if options else []))
        if code:
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
