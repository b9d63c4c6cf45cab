"""What `--help` and `import sky_monarch` cost, beside a bare Typer app with as many commands and options."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benches.report import emit

REPEATS = 15
BARE_APP = """
from typing import Annotated
import typer
app = typer.Typer(rich_markup_mode=None)
{commands}
app()
"""
BARE_COMMAND = '''
@app.command()
def command_{number}(
    name: Annotated[str, typer.Argument(help="What.")] = "x",
    one: Annotated[bool, typer.Option("--one", help="First.")] = False,
    two: Annotated[int, typer.Option("--two", help="Second.")] = 0,
    three: Annotated[list[str], typer.Option("--three", help="Third.")] = [],
    four: Annotated[str, typer.Option("--four", help="Fourth.")] = "",
) -> None:
    """Does a thing."""
'''


def cpu_s(argv: list[str], env: dict[str, str] | None = None) -> float:
    """CPU seconds of one child, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> None:
    """Measure and print."""
    from sky_monarch.cli import app

    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(
            BARE_APP.format(
                commands="".join(BARE_COMMAND.format(number=n) for n in range(len(app.registered_commands)))
            )
        )
        peers = {
            "sky-monarch --help": [sys.executable, "-m", "sky_monarch", "--help"],
            "bare typer --help": [sys.executable, str(bare), "--help"],
            "import sky_monarch": [sys.executable, "-c", "import sky_monarch"],
            "python -c pass": [sys.executable, "-c", "pass"],
        }
        costs: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(REPEATS):  # interleaved, so that a noisy moment hits all
            for name, argv in peers.items():
                costs[name].append(cpu_s(argv, {**os.environ, "NO_COLOR": "1"}))
    best = {name: min(values) for name, values in costs.items()}
    for name, value in best.items():
        emit(name, "cpu_min", value * 1000, "ms", load="quiet")
    emit(
        "sky-monarch",
        "help_cpu_ratio",
        best["sky-monarch --help"] / best["bare typer --help"],
        "ratio",
        load="quiet",
    )
    emit(
        "sky-monarch",
        "import_cpu",
        (best["import sky_monarch"] - best["python -c pass"]) * 1000,
        "ms",
        load="quiet",
    )
