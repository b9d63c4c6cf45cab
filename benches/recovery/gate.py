"""Two peers that live side by side and train in turns: ranks stop between blocks of steps until theirs is next.

Nothing else of a peer stops meanwhile: its managers beat, its supervisors watch.
"""

from __future__ import annotations

import time
from pathlib import Path

from benches.recovery.events import RankLog

_FILE = "allowed"
_POLL_S = 0.02
_LIMIT_S = 600.0


def allow(folder: Path, step: int) -> None:
    """Let the ranks that log into ``folder`` train up to ``step``."""
    fresh = folder / f"{_FILE}.new"
    fresh.write_text(str(step))
    fresh.replace(folder / _FILE)


class Gate:
    """Where one rank stops.

    Args:
        folder: Of its peer.
        log: Gets an event ``gate`` when the rank stops.
        block: Steps from one stop to the next; 0: there is none.
    """

    def __init__(self, folder: Path, log: RankLog, block: int) -> None:
        self._file, self._log, self._block = folder / _FILE, log, block
        self._allowed = 0

    def wait(self, step: int) -> None:
        """Wait, after ``step`` at the end of a block, until more is allowed.

        Raises:
            RuntimeError: It was not within ten minutes: the bench is gone.
        """
        if not self._block or step % self._block or step < self._allowed:
            return
        self._log.write("gate", step=step)
        deadline = time.monotonic() + _LIMIT_S
        while (allowed := int(self._file.read_text())) <= step:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody let this rank beyond step {step}")
            time.sleep(_POLL_S)
        self._allowed = allowed
