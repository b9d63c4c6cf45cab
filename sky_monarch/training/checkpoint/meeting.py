"""How the ranks of one replica group agree while they save one checkpoint together.

They share a folder by necessity, so they also talk through it: each value is a file that appears by a rename.
A collective would have to be entered by all, and could not be left when one of them dies or has no room.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from sky_monarch.errors import CheckpointError

__all__ = ["Meeting"]

_FOLDER = ".meeting"
_POLL_S = 0.02


class Meeting:
    """One rank's end. A rank that is alone meets itself, without files.

    Args:
        tmp: Where the checkpoint is being written.
        rank: This rank.
        world_size: Ranks of the group.
        limit_s: Longest time that all of it may take.
        cancelled: Set where this process leaves.
    """

    def __init__(
        self, tmp: Path, *, rank: int, world_size: int, limit_s: float, cancelled: threading.Event
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._tmp, self._folder = tmp, tmp / _FOLDER
        self._deadline = time.monotonic() + limit_s
        self._cancelled = cancelled
        self._own: dict[str, Any] = {}
        if world_size > 1:
            self._folder.mkdir(exist_ok=True)

    def tell(self, what: str, value: Any) -> None:
        """Say something, once."""
        topic = f"{what}-{self.rank}"
        self._own[topic] = value
        if self.world_size > 1:
            self._put(topic, pickle.dumps(value))

    def hear(self, what: str, rank: int) -> Any:
        """Wait for what ``rank`` says.

        Raises:
            CheckpointError: A rank has given up, or says nothing in time.
            OSError: A rank has given up because the operating system said no.
        """
        topic = f"{what}-{rank}"
        if topic in self._own:
            return self._own[topic]
        while True:
            try:
                # By the ranks of this group, in a folder that holds our pickles anyway.
                return pickle.loads((self._folder / topic).read_bytes())  # noqa: S301
            except FileNotFoundError:
                pass
            for failure in sorted(self._folder.glob("failed-*")):
                code, why = pickle.loads(failure.read_bytes())  # noqa: S301
                why = f"rank {failure.name.removeprefix('failed-')}: {why}"
                raise OSError(code, why) if code else CheckpointError(why)
            if not self._folder.exists():
                raise CheckpointError("another rank of this group gave it up")
            if time.monotonic() > self._deadline or self._cancelled.wait(_POLL_S):
                raise CheckpointError(f"rank {rank} of this group did not come along ({what})")

    def hear_all(self, what: str) -> list[Any]:
        """What each rank says."""
        return [self.hear(what, rank) for rank in range(self.world_size)]

    def fail(self, code: int, why: str) -> bool:
        """Tell the others not to wait; False where there is no room for even that.

        Args:
            code: What the operating system said; 0 where it was not that.
            why: In words.
        """
        with contextlib.suppress(OSError):
            self._put(f"failed-{self.rank}", pickle.dumps((code, why[:500])))
            return True
        return False

    def close(self) -> None:
        """Remove what was said: it is no part of the checkpoint."""
        if self.world_size > 1:
            shutil.rmtree(self._folder)

    def _put(self, topic: str, data: bytes) -> None:
        partial = self._folder / f".{topic}"
        partial.write_bytes(data)
        partial.rename(self._folder / topic)
