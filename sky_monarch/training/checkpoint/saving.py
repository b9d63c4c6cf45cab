"""What the session asks of checkpoints: save what is due, restore the newest. Training waits for the copy only."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from sky_monarch.errors import CheckpointError
from sky_monarch.training.checkpoint import contents
from sky_monarch.training.checkpoint.folder import CheckpointFolder, Complete
from sky_monarch.training.checkpoint.layout import MARKER, NOT_COMPLETED, OLD_STATE, Marker, name_of, step_of
from sky_monarch.training.checkpoint.meeting import Meeting
from sky_monarch.training.checkpoint.plan import CheckpointPlan
from sky_monarch.training.checkpoint.store import CheckpointStore
from sky_monarch.training.checkpoint.uploading import UPLOADED, Uploader

__all__ = ["Checkpoints"]

logger = logging.getLogger(__name__)

# One save, and one decision about what to restore, may take so long.
_SAVE_LIMIT_S = 1800.0
_RESTORE_LIMIT_S = 1800.0
_MOST_DECLINED = 16
_NOTHING = "-"


class Checkpoints:
    """The checkpoints of one rank's session.

    A checkpoint is saved by one replica group, in a thread of each of its ranks. One that falls due while the
    previous is still being written is left out. A failure (no space, no permission, no answer) is counted and
    logged; the run goes on, and the last good checkpoint stays.

    Args:
        plan: Where to, how often, how many.
        rank: This rank of its group.
        world_size: Ranks of the group. They share a file system.
        parameters: Of the optimizer, in its order.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        *,
        rank: int = 0,
        world_size: int = 1,
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        self.plan = plan
        self.folder = CheckpointFolder(plan.folder)
        self._rank, self._world_size, self._parameters = rank, world_size, parameters
        self._snapshots = contents.Snapshots(rank)
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self.begun: int | None = None
        self._writer = secrets.token_hex(4)
        self._group: dist.Store | None = None
        self._declined: deque[str] = deque(maxlen=_MOST_DECLINED)
        self._choice: str | None = None
        self._spoilt: set[str] = set()
        self._lock = threading.Lock()
        self._news: dict[str, float] = {}
        self.unchecked = True
        self._uploader: Uploader | None = None
        self._store: CheckpointStore | None = None
        if plan.url is not None:
            self._store = CheckpointStore(plan.url, cancelled=self._leaving)
            self._uploader = Uploader(
                self.folder,
                self._store,
                keep=plan.keep,
                done=self._saved,
                failed=lambda it, why: self._failed(it.step, why),
            )

    def join(self, address: tuple[str, int], generation: int) -> None:
        """Meet the other ranks of the group; nothing to do where this one is alone.

        Args:
            address: Of the group's store.
            generation: Of the group.
        """
        if self._world_size == 1:
            return
        store = dist.TCPStore(
            *address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_RESTORE_LIMIT_S)
        )
        # Under torchrun the store outlives a restart of the ranks.
        life = f"{generation}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._group = dist.PrefixStore(f"sky-monarch/checkpoint/{life}", store)
        self._writer = self._agree("writer", self._writer)

    def _agree(self, what: str, mine: str) -> str:
        """Rank 0's word for all."""
        if self._group is None:
            return mine
        if self._rank == 0:
            self._group.set(what, mine)
            return mine
        said: bytes = self._group.get(what)
        return said.decode()

    # --- restore ------------------------------------------------------------------------------------------

    def restore(self, live: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint that is whole, as ``(step, parts)``; None where there is none at all.

        What is damaged or half is named in the log, and the one before it is taken. All ranks of a group get
        the same. The answer is the same for the life of this process.

        Args:
            live: The parts as they are now.

        Raises:
            CheckpointError: There are complete ones, and none can be read: nothing of them is touched.
        """
        if self._choice is None:
            try:
                found = self._choose() if self._rank == 0 else None
            except BaseException:
                self._agree("restore", "!")
                raise
            self._choice = self._agree("restore", found or _NOTHING)
        if self._choice == _NOTHING:
            return None
        if self._choice == "!":
            raise CheckpointError("rank 0 of this group could not read a checkpoint")
        it = next((it for it in self.folder.complete() if it.name == self._choice), None)
        if it is None:
            raise CheckpointError(f"{self.folder.path / self._choice} has vanished")
        home = self.folder.path / it.name
        try:
            if OLD_STATE in it.marker.files:
                parts = contents.read_old(home)
            else:
                parts = contents.read(
                    home, live, self._parameters,
                    rank=self._rank, world_size=self._world_size, saved_by=it.marker.world_size,
                )  # fmt: skip
        except Exception as error:
            raise CheckpointError(
                f"cannot read the checkpoint {home}, though it is whole: {type(error).__name__}: {error}",
                hint="load it with the code and versions that saved it, or move it away",
            ) from error
        logger.info("continuing from the checkpoint %s", home)
        self._tell(checkpoint_restored_step=it.step)
        return it.step, parts

    def _choose(self) -> str | None:
        """Name of the newest that is whole, brought into the folder; None where there is none."""
        here, broken = self.folder.survey()
        places: dict[str, list[Complete]] = {str(self.folder.path): here}
        half = {str(self.folder.path): broken}
        if self._store is not None:
            there, half[self._store.url] = self._store.survey()
            known = {it.name for it in here}
            places[self._store.url] = [it for it in there if it.name not in known]
        worst: Exception | None = None
        for place, names in half.items():
            for name, why in names.items():
                logger.warning("skipped %s/%s: %s", place, name, why)
                if why != NOT_COMPLETED:
                    worst = CheckpointError(f"{place}/{name}: {why}")
                    self._tell(checkpoint_damaged_step=step_of(name) or 0)
        candidates = [(it.step, it.name, place, it) for place, found in places.items() for it in found]
        for step, name, place, it in sorted(candidates, key=lambda one: one[:2], reverse=True):
            try:
                if self._store is not None and place == self._store.url:
                    self._download(it)
                self.folder.verify(it)
            except (CheckpointError, OSError) as error:
                worst = error
                self._spoilt.add(name)
                logger.error("skipped the checkpoint %s/%s: %s; trying the one before", place, name, error)
                self._tell(checkpoint_damaged_step=step)
            else:
                return name
        if worst is not None:
            raise CheckpointError(
                f"no checkpoint in {self.plan.to} can be read; one of them: {worst}",
                hint="repair them, or move them away to begin at step 0",
            ) from worst
        return None

    def _download(self, it: Complete) -> None:
        store = self._store
        assert store is not None  # noqa: S101  # there was a candidate in it
        logger.info("downloading %s/%s, %d bytes", store.url, it.name, it.marker.size)
        self.folder.adopt(
            it.name, [*it.marker.files, MARKER], lambda file, path: store.fetch(it.name, file, path)
        )
        (self.folder.path / it.name / UPLOADED).touch()

    # --- save ---------------------------------------------------------------------------------------------

    def due(self, step: int, steps: int = 1) -> bool:
        """Whether ``step`` is one to save, or one of the others since the last commit was.

        Args:
            step: Committed.
            steps: Committed at once, up to this one.
        """
        return step // self.plan.every_steps > max(0, step - steps) // self.plan.every_steps

    def preflight(self, step: int, parts: Mapping[str, Any]) -> None:
        """Once, before the first save: warn where the disk cannot hold what is to be kept; never an error.

        Args:
            step: Steps committed: from the first one on an optimizer has all of its state.
            parts: What will be saved.
        """
        if not self.unchecked:
            return
        self.unchecked = False
        if self._rank != 0:
            return
        with contextlib.suppress(OSError, CheckpointError):
            each = contents.estimate(parts)
            # The one before stays until the next is complete; on the way to a store no other does.
            needed = each * (2 if self._uploader is not None else self.plan.keep + 1)
            disk = next(place for place in (self.folder.path, *self.folder.path.parents) if place.exists())
            room = shutil.disk_usage(disk).free + sum(it.marker.size for it in self.folder.complete())
            if each > 0 and needed > room:
                logger.warning(
                    "checkpoints will not fit: %d at a time of %d bytes each, but %s has room for %d bytes",
                    needed // each,
                    each,
                    self.folder.path,
                    room,
                )
                self._tell(
                    checkpoint_short_step=step, checkpoint_needed_bytes=needed, checkpoint_room_bytes=room
                )

    def save(self, step: int, parts: Mapping[str, Any]) -> bool:
        """Copy the state and begin to save it; all ranks of the group must do so.

        Returns:
            False where the previous save is still under way; nothing is begun then.
        """
        if self._thread is not None and self._thread.is_alive():
            logger.warning("no checkpoint of step %d: the previous one is still being written", step)
            self._declined.append(name_of(step, self._writer))
            return False
        state, self.begun = self._snapshots.take(parts), step
        self._thread = threading.Thread(target=self._save, args=(step, state), name=f"checkpoint-{step}")
        self._thread.start()
        return True

    def look_after_uploads(self) -> None:
        """Go on with what another group of this host saved and could not upload any more; never waits."""
        if self._uploader is not None and self._rank == 0:
            self._uploader.wake()

    def flush(self, limit_s: float) -> bool:
        """Wait for what is under way; False if it takes longer."""
        deadline = time.monotonic() + limit_s
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                logger.warning("left while a checkpoint was still being written")
                return False
        if self._uploader is not None and not self._uploader.wait(max(0.0, deadline - time.monotonic())):
            logger.warning("left while a checkpoint was still being uploaded to %s", self.plan.to)
            return False
        return True

    def close(self) -> None:
        """Give up waits: for other ranks, and for a store."""
        self._leaving.set()

    def news(self) -> dict[str, float]:
        """What happened so far, as metrics: the controller makes events of them."""
        with self._lock:
            return dict(self._news)

    def _save(self, step: int, state: Mapping[str, Any]) -> None:
        name = name_of(step, self._writer)
        started = time.monotonic()
        meeting = None
        try:
            tmp = self.folder.begin(name)
            meeting = Meeting(
                tmp,
                rank=self._rank,
                world_size=self._world_size,
                limit_s=_SAVE_LIMIT_S,
                cancelled=self._leaving,
            )
            self._require_room(state)
            mine = self.folder.seal(tmp, contents.write(tmp, state, meeting))
            meeting.tell("sealed", mine)
            if self._rank == 0:
                files = {file: facts for share in meeting.hear_all("sealed") for file, facts in share.items()}
                meeting.close()
                it = Complete(name, Marker(step=step, world_size=self._world_size, files=files))
                self.folder.publish(tmp, name, it.marker)
                logger.info(
                    "saved the checkpoint of step %d, %d bytes, in %.2f s",
                    step,
                    it.marker.size,
                    time.monotonic() - started,
                )
                self._published(it)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # the run must go on; torch's is no Exception
            told = (
                meeting is not None and self._world_size > 1 and meeting.fail(_errno_of(error), _words(error))
            )
            if self._rank == 0 or not told:  # the others would wait for a rank that says nothing
                self.folder.discard_tmp(name)
            if self._is_overtaken(step, error):
                logger.info("no checkpoint of step %d: a newer one was completed meanwhile", step)
                return
            logger.warning(
                "the checkpoint of step %d was not saved in %s: %s", step, self.folder.path, _words(error)
            )
            self._failed(step, error)
        finally:
            while self._declined:
                self._decline(self._declined.popleft())

    def _is_overtaken(self, step: int, error: BaseException) -> bool:
        """Whether another writer, with a newer one, removed this half one: an old generation that lingers."""
        with contextlib.suppress(CheckpointError):
            # EEXIST: Python's mkdir says so of a folder that was there, and is gone when it looks again.
            gone = _errno_of(error) in (errno.ENOENT, errno.EEXIST)
            return gone and any(it.step > step for it in self.folder.complete())
        return False

    def _published(self, it: Complete) -> None:
        # On the way to a store the folder is only the place where it waits.
        keep = self.plan.keep if self._uploader is None else 1
        in_use = set() if self._uploader is None else self._uploader.in_use()
        self.folder.retire(keep, newest=it.name, spoilt=self._spoilt, in_use=in_use)
        if self._uploader is None:
            self._saved(it)
        else:
            self._uploader.wake()

    def _require_room(self, state: Mapping[str, Any]) -> None:
        """Better no try than a full disk: journal and logs of the run may lie on the same one."""
        needed, free = contents.bytes_of(state), shutil.disk_usage(self.folder.path).free
        if needed > free:
            text = f"{os.strerror(errno.ENOSPC)}: {needed} bytes are needed, {free} are free"
            raise OSError(errno.ENOSPC, text, str(self.folder.path))

    def _decline(self, name: str) -> None:
        """Tell the other ranks not to wait for this one, which was still busy with the one before."""
        if self._world_size == 1:
            return
        with contextlib.suppress(OSError):
            tmp = self.folder.begin(name)
            meeting = Meeting(
                tmp, rank=self._rank, world_size=self._world_size, limit_s=0.0, cancelled=self._leaving
            )
            meeting.fail(0, "it was still busy with the checkpoint before")

    def _saved(self, it: Complete) -> None:
        self._tell(checkpoint_step=it.step, checkpoint_bytes=it.marker.size)

    def _failed(self, step: int, error: BaseException) -> None:
        with self._lock:  # the uploading thread counts, too
            self._news["checkpoint_failures"] = self._news.get("checkpoint_failures", 0.0) + 1
            self._news |= {"checkpoint_failed_step": float(step), "checkpoint_errno": float(_errno_of(error))}

    def _tell(self, **news: float) -> None:
        with self._lock:
            self._news |= {name: float(value) for name, value in news.items()}


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop(0)
        if one is None or one in found:
            continue
        found.append(one)
        if isinstance(one, CheckpointException):
            pending += [failure for failure, _ in one.failures.values()]
        pending += [one.__cause__, one.__context__]
    return found


def _errno_of(error: BaseException) -> int:
    """What the operating system said; 0 where it was not that."""
    return next((one.errno for one in _chain(error) if isinstance(one, OSError) and one.errno), 0)


def _words(error: BaseException) -> str:
    system = next((one for one in _chain(error) if isinstance(one, OSError) and one.errno), None)
    return str(system or error).strip().split("\n")[0]
