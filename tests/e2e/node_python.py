"""The Python of the nodes: this machine's interpreter with torch, TorchFT and what they need, and nothing else.

That is how a ROCm image or a site's own installation looks to sky-monarch: torch is there, sky-monarch is not.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.runs import ROOT

#: The environment that has torch. In a git worktree it may be another tree's.
TRAIN = Path(os.environ.get("SKY_MONARCH_TRAIN_VENV", ROOT / ".venv"))

#: Runs in that environment, and says where its interpreter is and which entries of its site-packages belong to
#: torch, TorchFT and all that they require.
_ASK = """
import json, site, subprocess, sys, sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

wanted, seen, entries = ["torch", "torchft", "numpy"], set(), set()
while wanted:
    name = wanted.pop()
    if name in seen:
        continue
    seen.add(name)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        continue  # for another platform
    entries |= {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted.append(requirement.name)
base = sys._base_executable
ask = "import json, site; print(json.dumps(site.getsitepackages()))"
folders = json.loads(subprocess.run([base, "-c", ask], capture_output=True, text=True, check=True).stdout)
print(json.dumps({
    "python": base, "prefix": sys.base_prefix, "folders": folders,
    "packages": sysconfig.get_path("purelib"), "entries": sorted(entries),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePython:
    """What the nodes' Python is made of.

    Attributes:
        python: The interpreter.
        prefix: The folder of its installation.
        mountpoint: Its site-packages, in whose place the nodes see ``entries``.
        packages: Where those are.
        entries: Files and folders in there.
    """

    python: Path
    prefix: Path
    mountpoint: Path
    packages: Path
    entries: tuple[str, ...]

    def lay_out(self, folder: Path) -> None:
        """Fill ``folder`` with links to the entries."""
        folder.mkdir()
        for entry in self.entries:
            if (self.packages / entry).exists():
                (folder / entry).symlink_to(self.packages / entry)


def find_node_python() -> NodePython:
    """Ask the environment that has torch."""
    python = TRAIN / "bin/python"
    done = subprocess.run(
        [str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    said = json.loads(done.stdout)
    folders = [Path(folder) for folder in said["folders"]]
    return NodePython(
        python=Path(said["python"]).resolve(),
        prefix=Path(said["prefix"]).resolve(),
        mountpoint=next(folder for folder in folders if folder.is_dir()).resolve(),
        packages=Path(said["packages"]).resolve(),
        entries=tuple(said["entries"]),
    )
