"""Durable checkpoints on a file system: the last resort when all donors are gone.

Layout of the folder: ``step-<12 digits>/state.pt`` and, written last of all, ``step-<12 digits>/COMPLETE``.
What has no ``COMPLETE`` is half a checkpoint: it is never loaded, and removed once a newer one is complete.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sky_monarch.errors import CheckpointError, ConfigError

__all__ = ["CheckpointFolder", "CheckpointPlan", "snapshot"]

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{12})")
_MARKER = "COMPLETE"
_STATE = "state.pt"
_TMP_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """The job's ``checkpoint``: where to, how often, how many are kept."""

    to: Path
    every_steps: int
    keep: int = 2

    @classmethod
    def parse(cls, text: str) -> CheckpointPlan:
        """Read ``SKY_MONARCH_CHECKPOINT``: ``{"to": …, "every_steps": …, "keep": …}``.

        Raises:
            ConfigError: It is not such JSON, a number is out of range, or ``to`` is no local folder.
        """
        try:
            fields = json.loads(text)
            to, every_steps, keep = fields["to"], fields["every_steps"], fields.get("keep", 2)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"SKY_MONARCH_CHECKPOINT is malformed: {error!r}") from error
        for name, number in (("every_steps", every_steps), ("keep", keep)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"checkpoint.{name} is {number!r}; it must be a whole number of at least 1")
        if not isinstance(to, str) or not to:
            raise ConfigError(f"checkpoint.to is {to!r}; it must be a folder")
        url = urlsplit(to)
        if url.scheme not in ("", "file") or (url.scheme == "file" and url.netloc not in ("", "localhost")):
            raise ConfigError(
                f"checkpoint.to is {to!r}; only folders can be written to",
                hint="mount the bucket and name the folder",
            )
        return cls(to=Path(url.path if url.scheme == "file" else to), every_steps=every_steps, keep=keep)


class CheckpointFolder:
    """Saves and finds the checkpoints of one run.

    Saving happens in a thread, one at a time. A checkpoint that falls due while the previous one is still
    being written is left out. A failure (no space, no permission) is remembered and logged; the run goes
    on, and the last good checkpoint stays.

    Args:
        plan: Where to, how often, how many.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self.plan = plan
        self.failures = 0
        self.last_error: str | None = None
        self._thread: threading.Thread | None = None

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        try:
            entries = list(self.plan.to.iterdir())
        except OSError:
            return []
        return sorted(
            int(match[1])
            for entry in entries
            if (match := _STEP.fullmatch(entry.name)) and (entry / _MARKER).is_file()
        )

    def load_newest(self) -> tuple[int, Any] | None:
        """The newest complete checkpoint, as ``(step, state)``; None where there is none.

        Raises:
            CheckpointError: It is complete by its marker, yet cannot be read.
        """
        import torch

        for name in sorted(entry.name for entry in self._incomplete()):
            logger.warning("skipped %s: it was not completed", self.plan.to / name)
        steps = self.complete_steps()
        if not steps:
            return None
        path = self._home(steps[-1])
        try:
            marker = json.loads((path / _MARKER).read_text())
            size = (path / _STATE).stat().st_size
            if size != marker["bytes"]:
                raise CheckpointError(f"{path / _STATE} has {size} bytes; its marker says {marker['bytes']}")
            # The user's own folder; the states of schedulers and data loaders are more than tensors.
            state = torch.load(path / _STATE, map_location="cpu", weights_only=False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {path}: {error}",
                hint="remove that folder to go back to the one before",
            ) from error
        return steps[-1], state

    def due(self, step: int) -> bool:
        """Whether ``step`` is one to save."""
        return step > 0 and step % self.plan.every_steps == 0

    def save(self, step: int, state: Any, *, wait: bool = False) -> bool:
        """Begin to save ``state``, which the caller must not change afterwards.

        Returns:
            False where the previous save is still under way; nothing is begun then.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._save, args=(step, state), name=f"checkpoint-{step}")
        self._thread.start()
        if wait:
            self._thread.join()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save under way; False if it takes longer."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _save(self, step: int, state: Any) -> None:
        started = time.monotonic()
        try:
            size = self._write(step, state)
            self._retire()
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            self.failures += 1
            self.last_error = str(error)
            logger.warning("the checkpoint of step %d was not saved in %s: %s", step, self.plan.to, error)
        else:
            took_s = time.monotonic() - started
            logger.info("saved the checkpoint of step %d, %d bytes, in %.2f s", step, size, took_s)

    def _write(self, step: int, state: Any) -> int:
        import torch

        home = self._home(step)
        if (home / _MARKER).is_file():
            return (home / _STATE).stat().st_size  # the same step, committed once: the same state
        self.plan.to.mkdir(parents=True, exist_ok=True)
        tmp = self.plan.to / f"{_TMP_PREFIX}{home.name}-{os.getpid()}"
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
            with (tmp / _STATE).open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            _sync(tmp)
            shutil.rmtree(home, ignore_errors=True)  # half a checkpoint of the same step
            tmp.rename(home)
            _sync(self.plan.to)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        marker = home / f"{_TMP_PREFIX}{_MARKER}"
        with marker.open("w") as file:
            json.dump({"step": step, "bytes": size}, file)
            file.flush()
            os.fsync(file.fileno())
        marker.rename(home / _MARKER)
        _sync(home)
        return size

    def _retire(self) -> None:
        """Remove all but the ``keep`` newest complete ones, and half checkpoints older than the newest."""
        steps = self.complete_steps()
        for step in steps[: -self.plan.keep]:
            home = self._home(step)
            # The marker goes first: a removal that stops half-way must not look complete.
            with contextlib.suppress(FileNotFoundError):
                (home / _MARKER).unlink()
            shutil.rmtree(home, ignore_errors=True)
        for entry in self._incomplete():
            match = _STEP.search(entry.name)
            if match and int(match[1]) <= steps[-1]:
                shutil.rmtree(entry, ignore_errors=True)

    def _incomplete(self) -> list[Path]:
        try:
            entries = list(self.plan.to.iterdir())
        except OSError:
            return []
        return [
            entry
            for entry in entries
            if (_STEP.fullmatch(entry.name) and not (entry / _MARKER).is_file())
            or entry.name.startswith(f"{_TMP_PREFIX}step-")
        ]

    def _home(self, step: int) -> Path:
        return self.plan.to / f"step-{step:012d}"


def snapshot(state: Any) -> Any:
    """A copy of ``state`` that training does not change: tensors cloned to the CPU, containers rebuilt."""
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(
        lambda leaf: (
            leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.copy(leaf)
        ),
        state,
    )


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
