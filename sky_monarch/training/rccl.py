"""Resilient over RCCL (and NCCL, its twin): what is cut is the communicator, by abort.

An abort may hang itself (it has, in several versions of both libraries), and so may the making of a
communicator whose peer is gone. Neither can be taken back from inside the process, so both have a limit, past
which the process ends itself: its agent replaces it in less time than it would hang.

Not run on a GPU yet: what the tests prove is who is aborted when, and what happens where that hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torchft.process_group import ProcessGroupNCCL

from sky_monarch.training.resilient import Mesh, Resilient

__all__ = ["Communicator", "ResilientRccl", "end_process"]

logger = logging.getLogger(__name__)

# Threads that wait for peers that are gone. Each holds a half-made communicator, and with it device memory.
_MOST_ABANDONED = 3


def end_process(why: str) -> None:
    """End this process so that nothing of it can hang: not by exit handlers, which would wait for the device."""
    logger.critical("this process ends itself: %s", why)
    os.kill(os.getpid(), signal.SIGKILL)


class Communicator:
    """The communicator of one quorum.

    Args:
        quorum_id: The quorum.
        abort: Aborts it.
        limit_s: Longest time for that.
        give_up: Called, with the reason, where it takes longer.
    """

    def __init__(
        self, quorum_id: int, abort: Callable[[], object], *, limit_s: float, give_up: Callable[[str], None]
    ) -> None:
        self.quorum_id = quorum_id
        self._abort, self._limit_s, self._give_up = abort, limit_s, give_up
        self._lock = threading.Lock()
        self._done: threading.Event | None = None

    def cut(self) -> int:
        """Abort it, once, and wait for that; a second caller waits as well, and returns 0."""
        with self._lock:
            first = self._done is None
            done = self._done = self._done or threading.Event()
        if first:
            threading.Thread(
                target=self._run, args=(done,), name=f"abort-{self.quorum_id}", daemon=True
            ).start()
        if not done.wait(self._limit_s):
            self._give_up(f"the abort of quorum {self.quorum_id} has hung for {self._limit_s:g} s")
        return int(first)

    def _run(self, done: threading.Event) -> None:
        try:
            self._abort()
        except Exception as error:  # noqa: BLE001  # a communicator that is broken already is as good as aborted
            logger.warning("the abort of quorum %d failed: %s", self.quorum_id, error)
        done.set()


class ResilientRccl(Resilient, ProcessGroupNCCL):  # type: ignore[misc]  # torchft has no type information
    """TorchFT's NCCL group, aborted at once when a member dies.

    Args:
        timeout: For one collective.
        connect_timeout: For the rendezvous store.
        init_limit: For making a communicator.
        abort_limit: For aborting one.
        give_up: Called, with the reason, where this process cannot go on.
    """

    def __init__(
        self,
        *,
        timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=4),
        init_limit: timedelta = timedelta(seconds=30),
        abort_limit: timedelta = timedelta(seconds=10),
        give_up: Callable[[str], None] = end_process,
    ) -> None:
        super().__init__(timeout=timeout, connect_timeout=connect_timeout, rendezvous_limit=init_limit)
        self._abort_limit_s = abort_limit.total_seconds()
        self._give_up = give_up
        # The device is chosen by thread, and the rendezvous has one of its own.
        available = torch.accelerator.is_available()
        self._device = torch.accelerator.current_device_index() if available else None

    def configure(self, *arguments: Any, **options: Any) -> None:
        """As :meth:`Resilient.configure`; ends the process where too many attempts hang."""
        if self.abandoned >= _MOST_ABANDONED:
            self._give_up(f"{self.abandoned} attempts to make a communicator hang")
        super().configure(*arguments, **options)

    def abort(self, errored: bool = True) -> None:
        """Abort the present communicator, within the limit; called by TorchFT too, when a collective is late."""
        with self._lock:
            mesh = self._mesh
        if mesh is not None and errored:
            logger.info("aborts quorum %d", mesh.quorum_id)
        self._leave(mesh)

    def _leave(self, mesh: Mesh | None) -> None:
        if mesh is not None:
            mesh.cut()
        self._pg = None

    def _connect(
        self, store: dist.Store, rank: int, world_size: int, quorum_id: int
    ) -> tuple[dist.ProcessGroup, Communicator]:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        group = self._create_pg(store, rank, world_size)
        communicator = Communicator(
            quorum_id, group.abort, limit_s=self._abort_limit_s, give_up=self._give_up
        )
        return group, communicator

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
        # Its future comes when the device has done the work: TorchFT's own wrapper waits for that, and aborts.
        return ProcessGroupNCCL._wrap_work(self, work, opts)
