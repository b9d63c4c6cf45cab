"""What a training process consists of: handed to groups that heal, and saved in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sky_monarch.errors import ConfigError
from sky_monarch.training.checkpoint.contents import MANAGER
from sky_monarch.training.checkpoint.saving import Checkpoints
from sky_monarch.training.manager import SessionManager

__all__ = ["TrainingState"]

logger = logging.getLogger(__name__)


class TrainingState:
    """The registered parts of the state, and how they become durable.

    Args:
        checkpoints: None for a job without checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self.checkpoints = checkpoints
        self._parts: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def add(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Add a part.

        Raises:
            ConfigError: The key is taken.
        """
        if key in self._parts or key == MANAGER:
            raise ConfigError(f"state {key!r} is registered already")
        self._parts[key] = (load, save)

    def hand_to(self, manager: SessionManager) -> None:
        """Let groups that heal have it."""
        for key, (load, save) in self._parts.items():
            manager.register_state_dict_fn(key, load, save)

    def restore(self, manager: SessionManager) -> bool:
        """Go on from the newest checkpoint; False where there is none.

        Raises:
            CheckpointError: There are some, and none can be read.
        """
        if self.checkpoints is None:
            return False
        found = self.checkpoints.restore({key: save() for key, (_, save) in self._parts.items()})
        if found is None:
            return False
        _, parts = found
        for key in self._parts.keys() - parts.keys():
            logger.warning("the checkpoint holds no %r: it begins anew", key)
        for key, (load, _) in self._parts.items():
            if key in parts:
                load(parts[key])
        manager.load_state_dict(parts[MANAGER])
        return True

    def save(self, manager: SessionManager, step: int, *, leads: bool) -> None:
        """Begin to save it where that is due.

        Args:
            manager: Has a state, too.
            step: Steps committed.
            leads: Whether it is the turn of this replica group, of which every rank takes part.
        """
        if self.checkpoints is None or not self.checkpoints.due(step):
            return
        if leads:
            self.checkpoints.save(
                step,
                {MANAGER: manager.state_dict(), **{key: save() for key, (_, save) in self._parts.items()}},
            )
        else:
            self.checkpoints.look_after_uploads()

    def news(self) -> dict[str, float]:
        """What happened to checkpoints so far, as metrics."""
        return {} if self.checkpoints is None else self.checkpoints.news()
