"""What the ranks of a run have printed, taken from its head into a folder of this machine."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sky_monarch.errors import ChannelError

__all__ = ["missing_text", "room_for_output", "take_output"]

_NAME = re.compile(r"(?:r\d+-\d+|setup-[A-Za-z0-9._-]+)/g\d+-\d+\.log")
_PIECE_BYTES = 256 * 1024
_LEAVE_FREE_BYTES = 1 << 30


def missing_text(count: int) -> str:
    """What stands in place of output that is not kept any more."""
    return f"... {count} bytes that were printed here are not kept any more ..."


def room_for_output(run_dir: Path, limit_bytes: int) -> int:
    """How many bytes of output this machine takes: no more than the run kept, and never the last of the disk."""
    try:
        free = shutil.disk_usage(run_dir).free
    except OSError:
        return 0
    return max(0, min(limit_bytes, free - _LEAVE_FREE_BYTES))


def take_output(stream: Iterator[bytes], logs: Path, *, max_bytes: int) -> int:
    """Unpack the tar file that a head sends; files that have arrived stay, whatever happens to the rest.

    Nothing is written but files that are named as an archive names them, whoever speaks for the head.

    Args:
        stream: The tar file, in pieces.
        logs: The folder to unpack into.
        max_bytes: What is beyond is left.

    Returns:
        Bytes of output that came.

    Raises:
        ChannelError: It is no such file, or ended before its end. What raised in ``stream`` passes through.
        OSError: The disk does not take it.
    """
    taken = 0
    try:
        with tarfile.open(fileobj=_Pieces(stream), mode="r|", bufsize=_PIECE_BYTES) as tar:
            for entry in tar:
                if not entry.isreg() or not _NAME.fullmatch(entry.name):
                    raise ChannelError(f"the head sends a file that is no output: {entry.name!r:.100}")
                if taken + entry.size > max_bytes:
                    break
                data = tar.extractfile(entry)
                if data is not None:
                    _write(logs / entry.name, data)
                    taken += entry.size
    except (tarfile.TarError, EOFError) as error:
        raise ChannelError(f"the output of the run did not come whole: {error}") from error
    return taken


def _write(path: Path, data: IO[bytes]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            shutil.copyfileobj(data, file, _PIECE_BYTES)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


class _Pieces(io.RawIOBase):
    """An iterator of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._rest += piece
        found, self._rest = self._rest[:size], self._rest[size:]
        return found
