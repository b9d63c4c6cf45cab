"""The archive as one stream, for whoever takes it to another machine."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

__all__ = ["tar_of"]

_PIECE_BYTES = 256 * 1024
_END_BYTES = 2 * tarfile.BLOCKSIZE


async def tar_of(files: Iterable[Path], max_bytes: int) -> AsyncIterator[bytes]:
    """A tar file of them, named ``<folder>/<name>``, as far as ``max_bytes`` of content go. Never whole in memory.

    One that grows meanwhile is what it was when its turn came, one that is dropped meanwhile is left out, or filled up
    with zeros.
    """
    left = max_bytes
    for path in files:
        try:
            size = path.stat().st_size
        except OSError:
            continue
        if size > left:
            break
        left -= size
        entry = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
        entry.size, entry.mode = size, 0o600
        yield entry.tobuf()
        sent = 0
        while sent < size:
            piece = await asyncio.to_thread(_piece, path, sent, min(_PIECE_BYTES, size - sent))
            sent += len(piece)
            yield piece
        if rest := -size % tarfile.BLOCKSIZE:
            yield bytes(rest)
    yield bytes(_END_BYTES)


def _piece(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size).ljust(size, b"\0")
    except OSError:
        return bytes(size)
