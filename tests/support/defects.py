"""Runs one test with one step of recovery left out: in a core that was built for it, or in a copy of a module."""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.mutant import Mutant
from tests.support.processes import environ_of, pids
from tests.support.runs import ROOT

Done = subprocess.CompletedProcess[str]
_HEAD = "from __future__ import annotations\n"
# Parts of each limit that are waited: what a defect keeps from happening need not be waited for long. A test that fails
# over something else was too slow for that (the machine is busy), and is run once more, with all its time.
_PATIENCE = ("0.25", "1")
_LIMIT_S = 200
# Taken once: pytest names the test that runs in a variable that comes and goes while others are read in threads.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def build_core() -> Path:
    """A core in which steps can be left out by name."""
    subprocess.run(
        ["cargo", "build", "--quiet", "--package", "sky-monarch-py", "--features", "mutants"],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    # The next ordinary build writes the same file: what runs here is a copy. One that others run is not written to.
    built, core = ROOT / "target" / "debug" / "lib_core.so", ROOT / "target" / "mutants" / "_core.abi3.so"
    core.parent.mkdir(exist_ok=True)
    if not core.exists() or not filecmp.cmp(built, core, shallow=False):
        fresh = core.with_suffix(f".{os.getpid()}")
        shutil.copy(built, fresh)
        fresh.replace(core)
    return core


def _link_all_but(module: Path, source: Path, target: Path) -> None:
    """Make ``target`` a folder of links into ``source``, with a copy of the one ``module`` in it."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.suffix == ".so" or entry.name == "__pycache__":
            continue
        if entry.name != module.parts[0]:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            _link_all_but(Path(*module.parts[1:]), entry, target / entry.name)
        else:
            shutil.copy(entry, target / entry.name)


def run(mutant: Mutant, make: Callable[[], Path], core: Path) -> Done:
    """Run the test of ``mutant`` with the defect; its words are what it has to fail with."""
    for patience in _PATIENCE:
        done = _run_in(make(), mutant, core, patience)
        if done.returncode != 1 or mutant.words in done.stdout:
            break
    return done


def _run_in(folder: Path, mutant: Mutant, core: Path, patience: str) -> Done:
    """Run it in a checkout made of links, with that core."""
    # The variable itself reaches no agent, which is started without what the shell has exported: its module sets it.
    chosen = f"{_HEAD}import os\nos.environ['SKY_MONARCH_MUTANT'] = {mutant.point!r}\n"
    module, old, new = (
        (mutant.module, mutant.old, mutant.new) if mutant.module else ("agent.py", _HEAD, chosen)
    )
    package = folder / "sky_monarch"
    _link_all_but(Path(module), ROOT / "sky_monarch", package)
    (package / "_core.abi3.so").symlink_to(core)
    for name in ("tests", "examples", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    text = (package / module).read_text()
    assert old in text, f"{module} has changed: it has no {old!r}"
    (package / module).write_text(text.replace(old, new, 1))
    env = {**_ENVIRONMENT, "PYTHONPATH": str(folder), "SKY_MONARCH_TEST_PATIENCE": patience}
    env.pop("SKY_MONARCH_TEST_SHARE", None)  # of the defects, not of the tests that they turn red
    if mutant.point:
        env["SKY_MONARCH_MUTANT"] = mutant.point  # for a lighthouse that a test starts by itself
    # In that folder: Python looks for the package there first.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test]
    try:
        return subprocess.run(
            command, cwd=folder, env=env, text=True, capture_output=True, timeout=_LIMIT_S, check=False
        )
    finally:
        _end_what_is_left(folder)


def _end_what_is_left(folder: Path) -> None:
    """Where a defect keeps ``down`` from ending a run. Every process of it, ranks too, has the folder in its path."""
    for pid in pids():
        if str(folder) in environ_of(pid).get("PYTHONPATH", "").split(os.pathsep) and pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def all_run(
    mutants: Sequence[Mutant], core: Path, make: Callable[[], Path], *, at_once: int
) -> Iterator[dict[Mutant, Future[Done]]]:
    """Run several, some at once: for the most part they wait."""
    with ThreadPoolExecutor(at_once) as pool:
        yield {mutant: pool.submit(run, mutant, make, core) for mutant in mutants}
        pool.shutdown(cancel_futures=True)


def assert_red(mutant: Mutant, done: Done) -> None:
    """The test has failed, and says why in the words that it should."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout, done.stdout
    assert mutant.words in done.stdout, done.stdout
