"""Looking into the files of a run that goes on: what was listed a moment ago may be gone by now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def read(path: Path) -> bytes:
    """What is in a file; nothing where it, or its process, is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


def all_files(folder: Path) -> list[Path]:
    """The regular files below ``folder``."""
    found = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    return [path for path in found if path.is_file()]


def holders(folder: Path, needle: bytes) -> list[Path]:
    """Those of them that hold ``needle``."""
    return [path for path in all_files(folder) if needle in read(path)]
