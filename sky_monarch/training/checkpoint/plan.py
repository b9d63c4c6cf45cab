"""The job's ``checkpoint``: where to, how often, how many are kept."""

from __future__ import annotations

import getpass
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sky_monarch.config.checkpoint_target import folder_of, require_usable
from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.errors import ConfigError

__all__ = ["CheckpointPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Where checkpoints go.

    Attributes:
        folder: Where ranks write: the target itself, or the place from which uploads start.
        url: Where checkpoints are uploaded to; None where ``folder`` is the target.
        every_steps: Steps between two saves.
        keep: Complete checkpoints that are kept at the target.
        on_notice: A group whose host is about to be taken away saves once more.
    """

    folder: Path
    url: str | None = None
    every_steps: int
    keep: int = 2
    on_notice: bool = False

    @property
    def to(self) -> str:
        """The target, to be shown."""
        return self.url or str(self.folder)

    @classmethod
    def parse(cls, text: str) -> CheckpointPlan:
        """Read ``SKY_MONARCH_CHECKPOINT``: ``{"to": …, "every_steps": …, "keep": …, "on_notice": …, "staging": …}``.

        Raises:
            ConfigError: It is not such JSON, a number is out of range, or nothing can be saved to ``to``.
        """
        try:
            fields = json.loads(text)
            to, every_steps, keep = fields["to"], fields["every_steps"], fields.get("keep", 2)
            staging, on_notice = fields.get("staging"), fields.get("on_notice", "leave")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"SKY_MONARCH_CHECKPOINT is malformed: {error!r}") from error
        for name, number in (("every_steps", every_steps), ("keep", keep)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"checkpoint.{name} is {number!r}; it must be a whole number of at least 1")
        if on_notice not in ("leave", "checkpoint"):
            raise ConfigError(f"checkpoint.on_notice is {on_notice!r}; it must be leave or checkpoint")
        saves = on_notice == "checkpoint"
        if not isinstance(to, str) or not to:
            raise ConfigError(f"checkpoint.to is {to!r}; it must be a folder or a URL")
        try:
            folder = folder_of(to)
            if folder is not None:
                return cls(folder=Path(folder), every_steps=every_steps, keep=keep, on_notice=saves)
            require_usable(to)
        except FieldRefusalError as error:
            raise ConfigError(f"checkpoint.to {error}", hint=error.fix) from error
        place = Path(staging) if staging else _default_staging(to)
        return cls(folder=place, url=to.rstrip("/"), every_steps=every_steps, keep=keep, on_notice=saves)


def _default_staging(url: str) -> Path:
    """Of a rank that nobody told: the same after a restart, another for each user and target."""
    tag = hashlib.sha256(f"{getpass.getuser()} {url}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"checkpoints-{tag}"
