"""What ranks on other hosts have printed, kept in the run's folder: it is there when their hosts are not.

The files are those of an agent of this machine (``logs/<slot>/g<generation>-<offset>.log``), so that whoever reads
those reads these. Together they have a limit: beyond it the slot that has most gives its oldest file, so that one
rank which prints without end costs the others nothing. What is gone is counted, slot by slot.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.launch.folder import write_json

__all__ = ["Archive", "Kept"]

_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 64
_FILE_BYTES = 4096
"""What a file takes at least: many short ones count for what they are."""
_LEAVE_FREE_BYTES = 256 << 20
_SLOT = re.compile(r"r(\d+)-(\d+)|setup-[A-Za-z0-9._-]+")
_SEGMENT = re.compile(r"g(\d+)-(\d+)\.log")
_COUNTS = "archive.json"
_SAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of a stream at an offset: larger than asked for where what was there is gone."""

    offset: int
    data: bytes


@dataclass(slots=True)
class _Segment:
    base: int
    size: int
    path: Path

    @property
    def end(self) -> int:
        return self.base + self.size

    @property
    def cost(self) -> int:
        return max(self.size, _FILE_BYTES)


class Archive:
    """The output of all ranks of a run that are on other hosts. Every method may wait for the disk.

    Args:
        run_dir: Folder of the run.
        limit_bytes: Most bytes on the disk.
        foreign: Replica groups whose logs in that folder are an agent's own.
        free_bytes: Says how much room the disk has; None: asks it.

    Attributes:
        kept_bytes: Bytes of output that are here.
        dropped: Bytes that are known to have been printed and are not here, by slot.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        limit_bytes: int,
        foreign: Collection[int] = (),
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._logs = run_dir / "logs"
        self._counts = run_dir / _COUNTS
        self._limit = limit_bytes
        self._segment_bytes = max(_FILE_BYTES, min(_SEGMENT_BYTES, limit_bytes // _MOST_SEGMENTS))
        self._free_bytes = free_bytes or self._free
        self._turn = threading.RLock()
        self._streams: dict[str, dict[int, list[_Segment]]] = {}
        self._cost: dict[str, int] = {}
        self._whole_cost = 0
        self._unsaved = False
        self._saved_s = -_SAVE_S
        self.kept_bytes = 0
        self._ends: dict[tuple[str, int], int] = {}
        self._load(frozenset(foreign))
        self.dropped = _dropped(self._counts)

    def _load(self, foreign: frozenset[int]) -> None:
        for folder in _entries(self._logs):
            match = _SLOT.fullmatch(folder.name)
            if match is None or (match[1] is not None and int(match[1]) in foreign):
                continue
            for path in _entries(folder):
                if name := _SEGMENT.fullmatch(path.name):
                    self._add(folder.name, int(name[1]), _Segment(int(name[2]), path.stat().st_size, path))
        for slot, streams in self._streams.items():
            for generation, segments in streams.items():
                segments.sort(key=lambda one: one.base)
                self._ends[slot, generation] = segments[-1].end

    def _add(self, slot: str, generation: int, segment: _Segment) -> None:
        self._streams.setdefault(slot, {}).setdefault(generation, []).append(segment)
        self._grow(slot, segment.size, segment.cost)

    def _grow(self, slot: str, size: int, cost: int) -> None:
        self.kept_bytes += size
        self._whole_cost += cost
        self._cost[slot] = self._cost.get(slot, 0) + cost

    # --- what there is ------------------------------------------------------------------------------------

    @property
    def dropped_bytes(self) -> int:
        """Bytes that are known to have been printed and are not here."""
        return sum(self.dropped.values())

    def generations(self, slot: str) -> tuple[int, ...]:
        """Generations of which there is something, in order."""
        with self._turn:
            return tuple(sorted(self._streams.get(slot, ())))

    def end(self, slot: str, generation: int) -> int:
        """Offset behind the last byte that was kept of a stream; 0 where none was."""
        with self._turn:
            return self._ends.get((slot, generation), 0)

    def read(self, slot: str, generation: int, offset: int, max_bytes: int) -> Kept:
        """Bytes from ``offset`` on, or from the first ones behind a gap there; never across a gap."""
        with self._turn:
            start, data = min(offset, self.end(slot, generation)), bytearray()
            for segment in self._streams.get(slot, {}).get(generation, ()):
                if segment.end <= start or len(data) >= max_bytes:
                    continue
                if segment.base > start + len(data):
                    if data:
                        break
                    start = segment.base
                at = start + len(data) - segment.base
                with segment.path.open("rb") as file:
                    file.seek(at)
                    data += file.read(min(max_bytes - len(data), segment.size - at))
            return Kept(start, bytes(data))

    def newest_first(self) -> list[Path]:
        """All files, those first that were written to last."""
        with self._turn:
            found = [(segment.path.stat().st_mtime_ns, segment.path) for _, _, segment in self._all()]
        return [path for _, path in sorted(found, reverse=True)]

    def _all(self) -> Iterator[tuple[str, int, _Segment]]:
        for slot, streams in self._streams.items():
            for generation, segments in streams.items():
                for segment in segments:
                    yield slot, generation, segment

    # --- what is added ------------------------------------------------------------------------------------

    def append(self, slot: str, generation: int, offset: int, data: bytes) -> None:
        """Keep bytes of a stream; what lies between its end and ``offset`` is gone, and counted.

        Raises:
            OSError: The disk does not take them; what it took before counts as kept.
        """
        with self._turn:
            end = self.end(slot, generation)
            if offset > end:
                self._count(slot, offset - end)
                self._ends[slot, generation] = offset
            elif offset < end:  # asked for twice
                data, offset = data[end - offset :], end
            while data:
                written = self._write(slot, generation, data)
                data = data[written:]

    def _write(self, slot: str, generation: int, data: bytes) -> int:
        self._make_room(min(len(data), self._segment_bytes))
        end = self.end(slot, generation)
        segments = self._streams.get(slot, {}).get(generation)
        last = segments[-1] if segments else None
        if last is None or last.end != end or last.size >= self._segment_bytes:
            folder = self._logs / slot
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            last = _Segment(end, 0, folder / f"g{generation}-{end:012}.log")
            self._add(slot, generation, last)
        handle = os.open(last.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(handle, data[: self._segment_bytes - last.size])
        finally:
            os.close(handle)
        before = last.cost
        last.size += written
        self._ends[slot, generation] = end + written
        self._grow(slot, written, last.cost - before)
        return written

    def _make_room(self, coming: int) -> None:
        """Let the oldest of whoever has most go, until there is room; a disk that others fill is not filled further."""
        while self._whole_cost + coming > self._limit and self._drop_one():
            pass
        missing = _LEAVE_FREE_BYTES + coming - self._free_bytes()
        if missing <= 0:
            return
        freed = 0
        while freed < coming:
            if not (gone := self._drop_one()):
                raise OSError(errno.ENOSPC, "the disk is nearly full, and what is left is for the journal")
            freed += gone

    def _drop_one(self) -> int:
        """Drop one file; the bytes that this gave back, 0 where there is none."""
        with_some = [slot for slot, cost in self._cost.items() if cost]
        if not with_some:
            return 0
        slot = max(with_some, key=lambda one: self._cost[one])
        generation = min(self._streams[slot])
        segments = self._streams[slot][generation]
        oldest = segments.pop(0)
        if not segments:
            del self._streams[slot][generation]
        self._grow(slot, -oldest.size, -oldest.cost)
        oldest.path.unlink(missing_ok=True)
        self._count(slot, oldest.size)
        return oldest.cost

    def _count(self, slot: str, gone: int) -> None:
        if gone:
            self.dropped[slot] = self.dropped.get(slot, 0) + gone
            self._unsaved = True
            if time.monotonic() - self._saved_s >= _SAVE_S:
                self.save()

    def save(self) -> None:
        """Write down what is gone, where that is not written yet."""
        with self._turn, suppress(OSError):  # a full disk: it is counted here, and written with the next one
            if self._unsaved:
                self._saved_s = time.monotonic()
                write_json(self._counts, {"dropped": self.dropped})
                self._unsaved = False

    def _free(self) -> int:
        found = os.statvfs(self._counts.parent)
        return found.f_bavail * found.f_frsize


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _dropped(path: Path) -> dict[str, int]:
    try:
        return {str(slot): int(count) for slot, count in json.loads(path.read_bytes())["dropped"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
