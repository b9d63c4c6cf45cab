"""A folder in memory that only this process and its children see, and that ends with them.

Nodes install gigabytes of small files; where a disk discards what is deleted, to remove them takes minutes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

_SIZE = "8g"
_CLONE_NEWNS = 0x20000
_unshared = False


def _own_mounts() -> None:
    """From here on, what this thread and its children mount is seen by them alone."""
    global _unshared
    if _unshared:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=20)
    _unshared = True


def make_scratch() -> Path:
    """A fresh folder; not below /tmp, in whose place each machine of a cluster sees one of its own."""
    _own_mounts()
    folder = Path(tempfile.mkdtemp(prefix="sm-e2e-", dir="/var/tmp"))
    words = ["mount", "-t", "tmpfs", "-o", f"mode=755,size={_SIZE}", "sm-e2e", str(folder)]
    subprocess.run(words, check=True, timeout=20)
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove it with all that is in it; once more is no mistake."""
    if folder.exists():
        if os.path.ismount(folder):
            # Lazily: who still looks at a file of it keeps that file, and nobody finds it any more.
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
        folder.rmdir()
