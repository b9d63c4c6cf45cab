"""What a training process consists of: handed to groups that heal, and saved in checkpoints."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sky_monarch.errors import ConfigError
from sky_monarch.training.checkpoint.contents import MANAGER
from sky_monarch.training.checkpoint.plan import CheckpointPlan
from sky_monarch.training.checkpoint.saving import Checkpoints
from sky_monarch.training.environment import RankEnvironment
from sky_monarch.training.healing import Replicated, Source
from sky_monarch.training.manager import SessionManager
from sky_monarch.training.sharding import Sharding

__all__ = ["TrainingState"]

logger = logging.getLogger(__name__)


class TrainingState:
    """The registered parts of the state, and how they become durable.

    Args:
        checkpoints: None for a job without checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self.checkpoints = checkpoints
        self.round_steps = 1  # steps that are committed at once; TorchFT's manager counts them as one
        self.last_step: int | None = None  # where the last round ends, which may be shorter
        self._parts: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    @classmethod
    def of(cls, env: RankEnvironment, optimizer: torch.optim.Optimizer) -> TrainingState:
        """The state of a rank, with the checkpoints that its job asks for.

        Raises:
            ConfigError: The job's ``checkpoint`` cannot be used.
        """
        if not env.checkpoint:
            return cls(None)
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        plan = CheckpointPlan.parse(env.checkpoint)
        return cls(Checkpoints(plan, rank=env.rank, world_size=env.world_size, parameters=parameters))

    def join(self, store: tuple[str, int], generation: int, undo: contextlib.ExitStack) -> None:
        """Meet the other ranks of the group, for checkpoints.

        Args:
            store: Address of the group's store.
            generation: Of the group.
            undo: Gets what must be done at the end.
        """
        if self.checkpoints is not None:
            undo.callback(self.checkpoints.close)
            self.checkpoints.join(store, generation)

    def add(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Add a part.

        Raises:
            ConfigError: The key is taken.
        """
        if key in self._parts or key == MANAGER:
            raise ConfigError(f"state {key!r} is registered already")
        self._parts[key] = (load, save)

    def replace(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Read and write a part that is there in another way."""
        self._parts[key] = (load, save)

    def hand_to(self, manager: SessionManager, sharding: Sharding, replicated: Replicated) -> None:
        """Let groups that heal have it: each rank what its like in this group has.

        Args:
            manager: Hands it over.
            sharding: Of the model over the ranks of the group.
            replicated: What all groups have alike after each commit.

        Raises:
            CheckpointError: It holds something that cannot be handed over.
        """
        sharding.note()
        parts = {}
        for key, (load, save) in self._parts.items():
            load_carried, parts[key] = sharding.carried(key, load, save)
            manager.register_state_dict_fn(key, load_carried, parts[key])
        manager.give(
            Source(
                parts=parts,
                replicated=replicated,
                step=manager.current_step,
                failed=lambda: manager.errored() is not None,
            )
        )

    def restore(self, manager: SessionManager) -> bool:
        """Go on from the newest checkpoint; False where there is none.

        Raises:
            CheckpointError: There are some, and none can be read.
            ConfigError: The newest is of a step at which this run commits nothing.
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
        parts[MANAGER] = self._in_rounds(parts[MANAGER])
        manager.load_state_dict(parts[MANAGER])
        return True

    def _in_rounds(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The manager's state, of a run that may have committed another number of steps at once."""
        step = saved.get(
            "steps", saved["step"] * saved.get("round_steps", 1)
        )  # older ones have whole rounds only
        if step % self.round_steps and step != self.last_step:
            raise ConfigError(
                f"the checkpoint is of step {step}, where no round of {self.round_steps} steps ends",
                hint="go on with the `sync` that it was saved with, or save under a new `checkpoint.to`",
            )
        return {**saved, "step": -(-step // self.round_steps)}

    def save(self, manager: SessionManager, step: int, *, leads: bool) -> dict[str, float]:
        """Begin to save it where that is due; returns what happened to checkpoints so far, as metrics.

        Args:
            manager: Has a state, too.
            step: Steps committed.
            leads: Whether it is the turn of this replica group, of which every rank takes part.
        """
        if self.checkpoints is None:
            return {}
        # A shorter round, the last one, is what is left.
        is_due = self.checkpoints.due(step, step % self.round_steps or self.round_steps)
        if leads and (is_due or self.checkpoints.unchecked):
            parts = self._gather(manager, step)
            self.checkpoints.preflight(step, parts)
            if is_due:
                self.checkpoints.save(step, parts)
        elif is_due:
            self.checkpoints.look_after_uploads()
        return self.checkpoints.news()

    def _gather(self, manager: SessionManager, step: int) -> dict[str, Any]:
        counts = {**manager.state_dict(), "round_steps": self.round_steps, "steps": step}
        return {MANAGER: counts, **{key: save() for key, (_, save) in self._parts.items()}}

    @property
    def saves(self) -> bool:
        """Whether the job has checkpoints."""
        return self.checkpoints is not None

    @property
    def saves_on_notice(self) -> bool:
        """Whether the job wants it saved before a host is taken away."""
        return self.checkpoints is not None and self.checkpoints.plan.on_notice

    def save_now(self, manager: SessionManager, step: int, limit_s: float) -> dict[str, float]:
        """Save it, due or not, and wait for that; returns what happened to checkpoints so far, as metrics.

        Args:
            manager: Has a state, too.
            step: Steps committed.
            limit_s: What is not complete by then never will be.
        """
        checkpoints, deadline = self.checkpoints, time.monotonic() + limit_s
        if checkpoints is None:
            return {}
        if checkpoints.flush(limit_s) and checkpoints.begun != step:
            checkpoints.save(step, self._gather(manager, step))
            checkpoints.flush(max(0.0, deadline - time.monotonic()))
        return checkpoints.news()

    def flush(self, limit_s: float) -> dict[str, float]:
        """Wait for a save under way; returns what happened to checkpoints so far, as metrics."""
        if self.checkpoints is None:
            return {}
        self.checkpoints.flush(limit_s)
        return self.checkpoints.news()
