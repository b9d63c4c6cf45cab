"""The thread that moves complete checkpoints from the folder of this host to a store."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sky_monarch.errors import CheckpointError
from sky_monarch.training.checkpoint.folder import CheckpointFolder, Complete
from sky_monarch.training.checkpoint.store import CheckpointStore

__all__ = ["UPLOADED", "Uploader"]

logger = logging.getLogger(__name__)

UPLOADED = ".uploaded"
_LOCK = ".upload.lock"


class Uploader:
    """Uploads the newest complete checkpoint of a folder, whoever saved it, one at a time.

    One process of a host uploads a checkpoint at a time. When it dies, the next that is woken goes on.
    Checkpoints that are completed faster than they can be uploaded are left out, except for the newest.

    Args:
        folder: Where complete checkpoints appear.
        store: Where to.
        keep: How many stay there.
        done: Called with what was uploaded.
        failed: Called with what was not, and why. It is tried again when the thread is woken next.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        store: CheckpointStore,
        *,
        keep: int,
        done: Callable[[Complete], None],
        failed: Callable[[Complete, Exception], None],
    ) -> None:
        self._folder, self._store, self._keep = folder, store, keep
        self._done, self._failed = done, failed
        self._lock = threading.Lock()
        # Held while it is set which one is uploaded, and while others look: a look that had begun before would open
        # the lock that is taken meanwhile.
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._current: str | None = None

    def wake(self) -> None:
        """Look for something to upload; never waits."""
        with self._lock:
            self._again = True
            if self._thread is None:
                # A store that does not answer must not keep the process from exiting.
                self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False if it takes longer."""
        deadline = time.monotonic() + timeout_s
        while (thread := self._thread) is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def in_use(self) -> set[str]:
        """Names of checkpoints that some process of this host is uploading."""
        with self._looking:
            return {
                it.name
                for it in self._folder.complete()
                if it.name == self._current or self._is_locked(it.name)
            }

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                newest = self._folder.complete()[-1:]
            except CheckpointError as error:
                logger.warning("nothing is uploaded: %s", error)
                continue
            for it in newest:
                self._upload(it)

    def _upload(self, it: Complete) -> None:
        home = self._folder.path / it.name
        if (home / UPLOADED).exists():
            return
        # Before the lock is there: a look at it from within this process would open it.
        with self._looking:
            self._current = it.name
        try:
            with self._locked(home) as mine:
                if not mine or (home / UPLOADED).exists():
                    return
                started = time.monotonic()
                try:
                    self._store.upload(home, it)
                    (home / UPLOADED).touch()
                    self._store.retire(self._keep, newest=it.name)
                except Exception as error:  # noqa: BLE001  # the stores' libraries have no common tree
                    logger.warning(
                        "the checkpoint of step %d is not at %s: %s", it.step, self._store.url, error
                    )
                    self._failed(it, error)
                    return
        finally:
            self._current = None
        logger.info(
            "uploaded the checkpoint of step %d, %d bytes, in %.2f s",
            it.step,
            it.marker.size,
            time.monotonic() - started,
        )
        self._done(it)

    @contextlib.contextmanager
    def _locked(self, home: Path) -> Iterator[bool]:
        """Hold the checkpoint's lock; the death of this process opens it."""
        try:
            # A lock of the process, not of the file handle: children that it forks do not hold it.
            fd = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            yield False  # it was retired a moment ago
            return
        try:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def _is_locked(self, name: str) -> bool:
        home = self._folder.path / name
        if not (home / _LOCK).exists():
            return False
        with self._locked(home) as mine:
            return not mine
