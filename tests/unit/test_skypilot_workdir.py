"""What of a working folder travels by SkyPilot's own transports: all that git would take along, and nothing else.

Skipped where SkyPilot is not installed; see `test_skypilot_tasks.py` for an environment with it.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from sky_monarch.launch.workdir import list_workdir, stage_workdir
from tests.unit.test_skypilot_tasks import PYTHON
from tests.unit.test_skypilot_tasks import pytestmark as needs_skypilot
from tests.unit.test_workdir import TREE, git, oracle, write

pytestmark = needs_skypilot

#: To hosts by rsync with SkyPilot's filter, to an API server elsewhere as SkyPilot's archive.
TRANSPORTS = """
import subprocess, sys
from sky.data.storage_utils import zip_files_and_folders
from sky.utils import command_runner
source, arrived, archive = sys.argv[1:]
which = "SKYIGNORE" if __import__("os").path.exists(source + "/.skyignore") else "GITIGNORE"
rule = getattr(command_runner, f"RSYNC_FILTER_{which}")
subprocess.run(f"rsync -a {rule} '{source}/' '{arrived}/'", shell=True, check=True)
zip_files_and_folders([source], archive, relative_to_items=True)
"""


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed here")
@pytest.mark.parametrize("tracked", [False, True], ids=["untracked", "tracked"])
def test_every_transport_of_skypilot_takes_along_what_git_does(tmp_path: Path, tracked: bool) -> None:
    assert PYTHON is not None
    tree = write(tmp_path / "job", {name: text for name, text in TREE.items() if ".skyignore" not in name})
    write(tree, {"foo/bar/dataset/a": "kept", "dataset/a": "ignored", "foo/.gitignore": "/dataset/*\n"})
    write(tree, {"src/.skyignore": "*\n"})  # somebody else's idea
    git(tree, "init", "--quiet")
    if tracked:  # what is ignored and tracked all the same
        git(tree, "add", "--force", "a.log", "data/big.bin", "src/x.tmp")
    wanted = oracle(tree) - {"src/.skyignore"}
    stage_workdir(list_workdir(tree), copy := tmp_path / "copy")

    arrived, archive = tmp_path / "arrived", tmp_path / "all.zip"
    subprocess.run([PYTHON, "-c", TRANSPORTS, copy, arrived, archive], check=True, timeout=120)

    files = {str(path.relative_to(arrived)) for path in arrived.rglob("*") if not path.is_dir()}
    assert files - {".skyignore"} == wanted
    with zipfile.ZipFile(archive) as found:
        names = {name.removeprefix("copy/") for name in found.namelist() if not name.endswith("/")}
    assert names - {".skyignore"} == wanted
