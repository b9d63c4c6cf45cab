"""Room for the last word: what is written at the end of a run has its place on the disk from the beginning.

Without it, a run that ended while its disk was full would have no end that anybody could read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Reserve"]

_BYTES = 256 * 1024
_BYTES_A_GROUP = 2048


class Reserve:
    """A file of a good size beside ``final.json`` that becomes it.

    Args:
        folder: Of the run.
        groups: Replica groups, whose last status it has to hold.
    """

    def __init__(self, folder: Path, *, groups: int) -> None:
        self._path = folder / ".final.reserve"
        self._size = _BYTES + _BYTES_A_GROUP * groups

    def take(self) -> None:
        """Make it, where the disk has the room now and the file system can promise it."""
        with suppress(OSError):
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, self._size)
            finally:
                os.close(handle)

    def give(self) -> None:
        """Remove it, where nothing became of it."""
        self._path.unlink(missing_ok=True)

    def write(self, path: Path, document: Mapping[str, Any]) -> None:
        """Write a file that is there as a whole or not at all, whenever the machine stops."""
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, indent=1)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._path.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
