"""What one checkpoint consists of: its name, its marker, and the digest of each file.

A checkpoint is a folder ``step-<12 digits>-<8 hex>``. The digits are steps committed. The hex belongs to who
wrote it, so that two writers of one step (an old generation that is still alive, and its replacement) never
write into one folder. The marker ``COMPLETE`` is written last, and names each file with its size and CRC-32:
a folder without a marker, or whose files differ from it, is no checkpoint.

CRC-32 guards against disks, cut-off copies and mix-ups, not against people: who may write into the folder
may run code in the job anyway, for checkpoints hold pickles.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.errors import CheckpointError

__all__ = [
    "MARKER",
    "NOT_COMPLETED",
    "OLD_STATE",
    "FileFacts",
    "Marker",
    "file_facts",
    "name_of",
    "step_of",
    "sync",
]

MARKER = "COMPLETE"
OLD_STATE = "state.pt"
"""The one file of a checkpoint of the first format, whose folder has no hex and whose marker no digest."""

_NAME = re.compile(r"step-(\d{12})(-[0-9a-f]{8})?")
NOT_COMPLETED = "it was not completed"
"""Why a half checkpoint is none: whoever wrote it died, which is no damage."""

_FORMAT = 2
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the marker says of a file; ``crc32`` is None in the first format."""

    size: int
    crc32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Content of ``COMPLETE``."""

    step: int
    world_size: int
    files: Mapping[str, FileFacts]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())

    def encode(self) -> bytes:
        """As the file holds it."""
        files = {name: {"bytes": it.size, "crc32": it.crc32} for name, it in sorted(self.files.items())}
        return json.dumps(
            {"format": _FORMAT, "step": self.step, "world_size": self.world_size, "files": files}
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Marker:
        """Read it.

        Raises:
            CheckpointError: It is damaged, or a newer version wrote it.
        """
        try:
            fields = json.loads(data)
            if "format" not in fields:  # the first one
                files = {OLD_STATE: FileFacts(int(fields["bytes"]), None)}
                return cls(step=int(fields["step"]), world_size=1, files=files)
            if fields["format"] != _FORMAT:
                raise CheckpointError(
                    f"its format is {fields['format']!r}; this version knows {_FORMAT} and older",
                    hint="use the version of sky-monarch that wrote it",
                )
            files = {
                str(name): FileFacts(int(it["bytes"]), int(it["crc32"]))
                for name, it in fields["files"].items()
            }
            if not files or any("/" in name or name in ("", ".", "..") for name in files):
                raise CheckpointError(f"{MARKER} names no files, or files elsewhere")
            return cls(step=int(fields["step"]), world_size=int(fields["world_size"]), files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{MARKER} is damaged: {error!r}") from error


def name_of(step: int, writer: str) -> str:
    """Folder of a checkpoint."""
    return f"step-{step:012d}-{writer}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def file_facts(path: Path, *, durable: bool = False) -> FileFacts:
    """Size and CRC-32 of a file as it can be read back.

    Args:
        path: Which.
        durable: Wait until its bytes are on the disk.
    """
    size = crc = 0
    with path.open("rb") as file:
        if durable:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return FileFacts(size, crc)


def sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
