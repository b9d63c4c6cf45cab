"""Reads the bytes of a job file: bounded, UTF-8, line ends unified."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.config.document import MAX_FILE_BYTES, DocumentError
from sky_monarch.config.problem import Problem

__all__ = ["Source", "read_source"]

_UTF32 = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UTF8_FIX = "save it as UTF-8 text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    r"""A job file's text and where relative paths in it start.

    Attributes:
        text: Without byte order mark, lines end with ``\n``.
        base: Absolute folder.
    """

    text: str
    base: Path


def read_source(source: str | os.PathLike[str] | bytes, base: Path | None = None) -> Source:
    """Read a job file.

    Args:
        source: A path; or the content itself, as bytes or as a text of more than one line.
        base: Folder where relative paths start; default: the file's, or the current one for content.

    Raises:
        DocumentError: There is no such file, or it is not text.
    """
    if isinstance(source, bytes):
        return Source(text=_decoded(source), base=(base or Path.cwd()).absolute())
    if isinstance(source, str) and "\n" in source.replace("\r", "\n"):
        return Source(text=_unified(source), base=(base or Path.cwd()).absolute())
    path = Path(source)
    text = _decoded(_file_bytes(path))
    return Source(text=text, base=(base or path.parent).absolute())


def _file_bytes(path: Path) -> bytes:
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to must not wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _refused(
            "there is no such file", "`sky-monarch init` writes a job file to start from"
        ) from None
    except PermissionError:
        raise _refused(
            "it may not be read by you", "check its permissions and those of its folders"
        ) from None
    except (OSError, ValueError) as error:
        raise _refused(f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise _refused("it is a folder", "name the job file in it")
        if not stat.S_ISREG(mode):
            raise _refused("it is no regular file", "write its content to a file first")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refused(f"it cannot be read ({error.strerror})") from None
    finally:
        os.close(handle)
    return data


def _decoded(data: bytes) -> str:
    if len(data) > MAX_FILE_BYTES:
        raise _refused(
            f"it is larger than {MAX_FILE_BYTES // 1024} KiB", "keep scripts and data in files of the workdir"
        )
    if data.startswith(_UTF32):
        raise _refused("it is UTF-32", _UTF8_FIX)
    if data.startswith(_UTF16) or (
        data[1::2].count(0) > len(data) // 4 or data[::2].count(0) > len(data) // 4
    ):
        raise _refused("it is UTF-16", _UTF8_FIX)
    if b"\0" in data:
        raise _refused("it is binary", "name a job file, which is text")
    try:
        return _unified(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        column = len(data[start : error.start].decode("utf-8", "replace")) + 1
        message = f"it is no UTF-8: byte 0x{data[error.start]:02x}"
        raise DocumentError(
            Problem(path="", message=message, line=line, column=column, fix=_UTF8_FIX)
        ) from None


def _unified(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _refused(message: str, fix: str | None = None) -> DocumentError:
    return DocumentError(Problem(path="", message=message, fix=fix))
