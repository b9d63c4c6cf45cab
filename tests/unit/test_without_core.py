"""An installation without the compiled core launches elsewhere; a local `up` says so before it writes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sky_monarch

PACKAGE = Path(sky_monarch.__file__).parent
# The hook of an editable install would find the core all the same.
COMMAND = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
from sky_monarch.__main__ import main
sys.exit(main())
"""


def run_without_core(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from a copy of the package that holds everything but the core."""
    package = folder / "tree" / "sky_monarch"
    if not package.exists():
        package.mkdir(parents=True)
        for entry in PACKAGE.iterdir():
            if entry.suffix != ".so" and entry.name != "__pycache__":
                (package / entry.name).symlink_to(entry)
    env = {
        **os.environ,
        "PYTHONPATH": str(folder / "tree"),
        "SKY_MONARCH_STATE_DIR": str(folder / "state"),
    }
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_local_up_without_the_core_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nreplicas: 2\nrun: sleep 60\n")
    for launcher in (["validate", "job.yaml"], ["plan", "job.yaml"]):
        done = run_without_core(tmp_path, *launcher)
        assert done.returncode == 0, done.stderr
    dry = run_without_core(tmp_path, "up", "job.yaml", "--dry-run")
    assert dry.returncode == 2
    assert "sync: every_step" in dry.stdout, "the plan is shown"
    assert (
        "note: `up` would not start from this machine: this installation has no compiled core" in dry.stderr
    )

    done = run_without_core(tmp_path, "up", "job.yaml")

    assert done.returncode == 2
    assert "no compiled core" in done.stderr
    assert "hint:" in done.stderr
    assert not (tmp_path / "state").exists()
