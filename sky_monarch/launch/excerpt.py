"""What a run folder says that may be shown to somebody else: bounded, the newest first, without secrets.

The values that must be taken out are in ``private.json``, which an ended run does not keep. So the excerpt of
a run is made at that moment, and kept in its place.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import sqlite3
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sky_monarch.launch.redaction import Redactor

if TYPE_CHECKING:
    from sky_monarch.launch.folder import RunFolder

__all__ = ["KEPT", "Excerpt", "archive", "keep", "kept"]

KEPT = "redacted.tar.gz"
"""The excerpt of an ended run, in its folder."""

_KEPT_BYTES = 8 << 20
_FILE_BYTES = 2 << 20
_JSON_BYTES = 16 << 20
_EVENTS = 50_000
_EVENTS_BYTES = 8 << 20
_LEFT_OUT = "its values are unknown by now: what the ranks printed may hold some"
_SLOT = re.compile(r"r\d+-\d+|setup(?:-[A-Za-z0-9._-]+)?|fork-server|store")
_SEGMENT = re.compile(r"(.+)-(\d+)\.log")
_OWN = ("agent.log", "controller.log", "lighthouse.log", "provisioner.log")
_DOCUMENTS = (
    "run.json",
    "job.json",
    "final.json",
    "agent.json",
    "controller.json",
    "lighthouse.json",
    "provisioner.json",
    "requests.json",
)
_COUNTERS = ("lighthouse.state",)
_PIDS = ("agent.pid", "controller.pid", "lighthouse.pid", "provisioner.pid")


class Excerpt:
    """Collects members of an archive.

    Args:
        folder: Of the run.
        redactor: Takes the secrets out.
        most_bytes: For logs, altogether.
        logs: Where the output is; None: in the folder.

    Attributes:
        members: Data by name.
        notes: What is missing, and why, by name.
    """

    def __init__(
        self, folder: RunFolder, redactor: Redactor, *, most_bytes: int, logs: Path | None = None
    ) -> None:
        self._folder, self._redactor = folder, redactor
        self._logs = folder.path / "logs" if logs is None else logs
        self._left = most_bytes
        self.members: dict[str, bytes] = {}
        self.notes: dict[str, str] = {}

    def collect(self) -> None:
        """Take everything; nothing that is damaged or missing stops it."""
        for name in (*_DOCUMENTS, *_COUNTERS, *_PIDS):
            self._document(name)
        self._events()
        for name in _OWN:
            # The agent logs its events, and in those are the last lines of ranks.
            if self._redactor.knows_values or name != "agent.log":
                self._stream(name, [self._folder.path / name])
            else:
                self.notes[name] = _LEFT_OUT
        if self._redactor.knows_values:
            for name, paths in self._outputs():
                self._stream(name, paths)
        else:
            self.notes["logs"] = _LEFT_OUT

    def _document(self, name: str) -> None:
        try:
            data = _read(self._folder.path / name, _JSON_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            self.notes[name] = f"cannot be read: {error.strerror}"
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            self.notes[name] = f"is damaged: no JSON, {len(data)} bytes"
            return
        self.members[name] = _json(self._redactor.value(value))

    def _events(self) -> None:
        path = self._folder.journal
        rows: list[bytes] = []
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise OSError("it is no file")
            # mode=ro still honours the write-ahead log of a controller that died.
            with contextlib.closing(
                sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=2.0)
            ) as journal:
                query = "SELECT id, event FROM events ORDER BY id DESC"
                length = 0
                for number, body in journal.execute(query):
                    if len(rows) >= _EVENTS or length + len(body) > _EVENTS_BYTES:
                        self.notes["events.ndjson"] = "begins here: what is older was left out"
                        break
                    row = _json(self._redactor.value({"id": number, **json.loads(body)}), indent=None)
                    rows.append(row)
                    length += len(row)
        except FileNotFoundError:
            return
        except (sqlite3.Error, OSError, ValueError, TypeError, RecursionError) as error:
            self.notes["events.ndjson"] = f"what is older: {self._redactor.text(str(error))}"
        self.members["events.ndjson"] = b"".join(reversed(rows))

    def _outputs(self) -> Iterator[tuple[str, list[Path]]]:
        """Streams of captured output and their files in order, the stream that was written to last first."""
        streams: dict[str, list[tuple[int, Path]]] = {}
        for slot in _entries(self._logs):
            if _SLOT.fullmatch(slot.name) and slot.is_dir() and not slot.is_symlink():
                for path in _entries(slot):
                    if match := _SEGMENT.fullmatch(path.name):
                        name = f"logs/{slot.name}/{match[1]}.log"
                        streams.setdefault(name, []).append((int(match[2]), path))
        ordered = {name: [path for _, path in sorted(parts)] for name, parts in streams.items()}
        yield from sorted(ordered.items(), key=lambda item: -_changed(item[1][-1]))

    def _stream(self, name: str, paths: list[Path]) -> None:
        """The end of a stream. All its files as one: a secret may begin in one and end in the next."""
        most = min(_FILE_BYTES, self._left)
        if most <= 0:
            self.notes[name] = "was left out: enough of newer output is here"
            return
        data, cut = b"", False
        for path in reversed(paths):
            if len(data) > most:
                cut = True
                break
            try:
                data = _read(path, most + 1, end=True) + data
            except FileNotFoundError:
                continue
            except OSError as error:
                self.notes[name] = f"cannot be read: {error.strerror}"
        if cut or len(data) > most:
            # Up to the first end of line: a secret that was cut in two would not be known again.
            data = data[-most:].partition(b"\n")[2]
            self.notes[name] = "begins here: what is older was left out"
        self._left -= len(data)
        if data:
            self.members[name] = self._redactor.bytes(data)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if not folder.is_symlink() else []
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, most: int, *, end: bool = False) -> bytes:
    """A regular file's first or last bytes; links are not followed, and nothing blocks."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no file")
        if end and found.st_size > most:
            file.seek(-most, os.SEEK_END)
        return file.read(most)


def _json(value: Any, *, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode(errors="replace")


def archive(members: dict[str, bytes]) -> bytes:
    """The members as a ``.tar.gz``; of no user, all from now."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def keep(folder: RunFolder) -> None:
    """Make the excerpt while the values are known. Never a reason to keep the secrets themselves: errors pass."""
    private = folder.private
    if private is None or (folder.path / KEPT).exists():
        return
    with contextlib.suppress(OSError, ValueError, sqlite3.Error, tarfile.TarError):
        excerpt = Excerpt(folder, Redactor(private, names=folder.variables), most_bytes=_KEPT_BYTES)
        excerpt.collect()
        data = archive({**excerpt.members, "notes.json": _json(excerpt.notes)})
        temporary = folder.path / f".{KEPT}.{os.getpid()}.{secrets.token_hex(2)}"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            temporary.replace(folder.path / KEPT)
        finally:
            temporary.unlink(missing_ok=True)


def kept(folder: RunFolder) -> tuple[dict[str, bytes], dict[str, str]] | None:
    """Members and notes of the excerpt that was kept; None where there is none that can be read."""
    members: dict[str, bytes] = {}
    try:
        data = _read(folder.path / KEPT, 4 * _KEPT_BYTES)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            for entry in tar:
                file = tar.extractfile(entry) if entry.isreg() else None
                if file is not None:
                    members[entry.name] = file.read(_JSON_BYTES)
        notes = json.loads(members.pop("notes.json", b"{}"))
    except (OSError, ValueError, tarfile.TarError, EOFError):
        return None
    return members, {str(name): str(note) for name, note in notes.items()}
