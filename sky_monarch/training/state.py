"""What a training process consists of: handed to groups that heal, and saved in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sky_monarch.errors import CheckpointError, ConfigError
from sky_monarch.training.checkpoint import CheckpointFolder, snapshot
from sky_monarch.training.manager import SessionManager

__all__ = ["TrainingState"]

logger = logging.getLogger(__name__)


class TrainingState:
    """The registered parts of the state, and the folder in which they are saved.

    Args:
        folder: None for a job without checkpoints.
    """

    def __init__(self, folder: CheckpointFolder | None) -> None:
        self._folder = folder
        self._parts: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def add(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Add a part.

        Raises:
            ConfigError: The key is taken.
        """
        if key in self._parts:
            raise ConfigError(f"state {key!r} is registered already")
        self._parts[key] = (load, save)

    def hand_to(self, manager: SessionManager) -> None:
        """Let groups that heal have it."""
        for key, (load, save) in self._parts.items():
            manager.register_state_dict_fn(key, load, save)

    def restore(self, manager: SessionManager) -> bool:
        """Go on from the newest checkpoint; False where there is none to be read."""
        if self._folder is None:
            return False
        try:
            newest = self._folder.load_newest()
        except CheckpointError as error:
            logger.warning("starting without a checkpoint: %s", error)
            return False
        if newest is None:
            return False
        step, state = newest
        for key, (load, _) in self._parts.items():
            if key in state["states"]:
                load(state["states"][key])
        manager.load_state_dict(state["manager"])
        logger.info("continuing from the checkpoint of step %d", step)
        return True

    def save(self, manager: SessionManager, step: int, *, leader: bool) -> dict[str, float]:
        """Begin to save it, where it is due and this rank's turn; returns metrics of it."""
        if self._folder is None:
            return {}
        if leader and self._folder.due(step):
            state = {
                "manager": manager.state_dict(),
                "states": {key: snapshot(save()) for key, (_, save) in self._parts.items()},
            }
            if not self._folder.save(step, state):
                logger.warning("no checkpoint of step %d: the previous one is still being written", step)
        return {"checkpoint_failures": float(self._folder.failures)} if self._folder.failures else {}

    def flush(self, limit_s: float) -> None:
        """Wait for a save under way."""
        if self._folder is not None and not self._folder.wait(limit_s):
            logger.warning("left while a checkpoint was still being written")
