"""A folder of checkpoints, in which several processes may write at once, and die at any moment.

A checkpoint is written under a name that begins with ``.tmp-``: files, fsync, marker, fsync. One rename makes
it visible as a whole. What is removed is renamed first, too, so that nobody ever sees half of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.errors import CheckpointError
from sky_monarch.training.checkpoint.layout import (
    MARKER,
    NOT_COMPLETED,
    FileFacts,
    Marker,
    file_facts,
    step_of,
    sync,
)

__all__ = ["CheckpointFolder", "Complete"]

logger = logging.getLogger(__name__)

_MOST_LOOKS = 5
_TMP = ".tmp-"
_TRASH = ".trash-"


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint with a marker whose files have the sizes that it says."""

    name: str
    marker: Marker

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.marker.step


class CheckpointFolder:
    """The checkpoints in one folder.

    Args:
        path: Need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def survey(self) -> tuple[list[Complete], dict[str, str]]:
        """All complete checkpoints, ascending, and what looks like one and is none, with the reason.

        Raises:
            CheckpointError: The folder is there and cannot be read. (Not "there is none"!)
        """
        names = self._names()
        for _ in range(_MOST_LOOKS):
            complete: list[Complete] = []
            broken: dict[str, str] = {}
            for name in names:
                if name.startswith(_TMP):
                    broken[name] = NOT_COMPLETED
                elif step_of(name) is not None:
                    try:
                        complete.append(Complete(name, self._marker(name)))
                    except CheckpointError as error:
                        broken[name] = str(error)
            before, names = names, self._names()
            if names == before:
                break
            # Others write here: one that is gone by now has gone for newer ones, which the list before may lack.
        return sorted(complete, key=lambda it: (it.step, it.name)), broken

    def complete(self) -> list[Complete]:
        """All complete checkpoints, ascending by step."""
        return self.survey()[0]

    def verify(self, it: Complete) -> None:
        """Read every byte of it.

        Raises:
            CheckpointError: A file is missing or differs from what was written; it is named.
        """
        for name, expected in it.marker.files.items():
            path = self.path / it.name / name
            try:
                found = file_facts(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            if found.size != expected.size:
                raise CheckpointError(f"{path} has {found.size} bytes; its marker says {expected.size}")
            if expected.crc32 is not None and found.crc32 != expected.crc32:
                raise CheckpointError(f"{path} is damaged: its CRC-32 is not the one that was written")

    def begin(self, name: str) -> Path:
        """A place in which to write checkpoint ``name``. The ranks of a group get the same."""
        tmp = self.path / f"{_TMP}{name}"
        tmp.mkdir(parents=True, exist_ok=True)
        return tmp

    def seal(self, tmp: Path, names: Collection[str]) -> dict[str, FileFacts]:
        """Make files durable, and read them back for their digests."""
        return {name: file_facts(tmp / name, durable=True) for name in names}

    def publish(self, tmp: Path, name: str, marker: Marker) -> None:
        """Complete what :meth:`begin` began: marker last, then one rename.

        Raises:
            OSError: Somebody removed it, or the disk is full; nothing has become visible.
        """
        with (tmp / MARKER).open("wb") as file:
            file.write(marker.encode())
            file.flush()
            os.fsync(file.fileno())
        sync(tmp)
        tmp.rename(self.path / name)
        sync(self.path)

    def discard(self, name: str) -> None:
        """Remove a checkpoint, complete or not, so that nobody sees half of it; nothing where it is gone."""
        # Another process may do the same, or still write in it: who renames it owns it.
        trash = self.path / f"{_TRASH}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            (self.path / name).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    def adopt(self, name: str, files: Collection[str], fetch: Callable[[str, Path], None]) -> None:
        """Bring a checkpoint from elsewhere; others may do the same at the same time.

        Args:
            name: The checkpoint.
            files: Its files, the marker last.
            fetch: Called with a file's name and where to put it.
        """
        private = f"{_TMP}{name}.{secrets.token_hex(4)}"
        tmp = self.path / private
        tmp.mkdir(parents=True)
        try:
            for file in files:
                fetch(file, tmp / file)
            try:
                tmp.rename(self.path / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else somebody was faster
        finally:
            self.discard(private)

    def discard_tmp(self, name: str) -> None:
        """Remove what was begun as ``name``."""
        self.discard(f"{_TMP}{name}")

    def retire(
        self, keep: int, *, newest: str, spoilt: Collection[str] = (), in_use: Collection[str] = ()
    ) -> None:
        """Remove all but the ``keep`` newest steps, and half ones that nobody can want any more.

        Args:
            keep: How many steps stay.
            newest: The one that was just completed: it stays whatever else is there.
            spoilt: Known to be damaged: they do not count.
            in_use: They stay, and count.
        """
        step = step_of(newest)
        complete, broken = self.survey()
        good = [it for it in complete if it.name not in spoilt]
        kept_steps = sorted({it.step for it in good})[-keep:]
        for it in complete:
            if it.name == newest or it.name in in_use:
                continue
            # Two of one step stay until that step goes: neither writer can know that the other's is whole.
            if kept_steps and it.step < kept_steps[-1] and it.step not in kept_steps:
                self.discard(it.name)
        for name in broken:
            half = step_of(name.removeprefix(_TMP).partition(".")[0])
            if half is not None and step is not None and half < step:
                self.discard(name)
        for name in self._names():
            if name.startswith(_TRASH):  # its owner died over it
                shutil.rmtree(self.path / name, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208  # names, not paths
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _marker(self, name: str) -> Marker:
        home = self.path / name
        try:
            marker = Marker.decode((home / MARKER).read_bytes())
            sizes: Mapping[str, int] = {file: (home / file).stat().st_size for file in marker.files}
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise CheckpointError(NOT_COMPLETED if missing == MARKER else f"{missing} is missing") from error
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
        for file, expected in marker.files.items():
            if sizes[file] != expected.size:
                raise CheckpointError(f"{file} has {sizes[file]} bytes; its marker says {expected.size}")
        if marker.step != step_of(name):
            raise CheckpointError(f"its marker belongs to step {marker.step}")
        return marker
