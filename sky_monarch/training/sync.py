"""In which way a session keeps its replica groups together: averages in each step, or DiLoCo's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.config.sync import EVERY_STEP, local_steps, read_sync
from sky_monarch.errors import ConfigError
from sky_monarch.training.environment import RankEnvironment

if TYPE_CHECKING:
    from sky_monarch.training.session import Session

__all__ = ["class_for", "sync_of"]

logger = logging.getLogger(__name__)


def sync_of(argument: str | None) -> int:
    """Steps that a group takes alone between two outer ones; 0 where groups average in each step.

    Args:
        argument: The script's, which wins over the job's; None where it leaves that to the job.

    Raises:
        ConfigError: The one that counts is neither ``every_step`` nor ``diloco(n)``.
    """
    if argument is None:
        return local_steps(RankEnvironment.read().sync or EVERY_STEP)
    try:
        return local_steps(read_sync(argument))
    except FieldRefusalError as error:
        hint = f"did you mean {error.suggestion!r}?" if error.suggestion else None
        raise ConfigError(f"sync {error}", hint=hint) from error


def class_for(wanted: type[Session], options: Mapping[str, Any]) -> type[Session]:
    """The class of a session that is asked for as ``wanted``.

    Args:
        wanted: Session, or one that is derived from it.
        options: That it is made with.

    Raises:
        ConfigError: A class of the script's own that knows nothing of DiLoCo, an option that is for DiLoCo only,
            or as :func:`sync_of` does.
    """
    from sky_monarch.training.diloco_session import DilocoSession
    from sky_monarch.training.session import Session

    argument, job = options.get("sync"), RankEnvironment.read().sync
    steps = sync_of(argument)
    if not steps and options.get("outer_optimizer") is not None:
        raise ConfigError("outer_optimizer is given, but groups average in each step", hint="sync: diloco(n)")
    if argument is not None and job is not None and local_steps(job) != steps:
        logger.warning("the job says sync: %s, the script %s: the script's counts", job, argument)
    if not steps or issubclass(wanted, DilocoSession):
        return wanted
    if wanted is Session:
        return DilocoSession
    raise ConfigError(
        f"{wanted.__name__} cannot do sync: diloco({steps})", hint="derive it from DilocoSession"
    )
