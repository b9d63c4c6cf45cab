"""What a job, and this machine for a job that runs on it, has to have: seen before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sky_monarch.errors import ConfigError
from sky_monarch.launch.runnable import require_preload, require_runnable

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["require_accelerators", "require_here"]


def require_here(job: JobSpec, env: Mapping[str, str]) -> None:
    """Refuse a job that certainly cannot run here.

    Args:
        job: Which.
        env: What its ranks inherit beneath its own variables.

    Raises:
        ConfigError: Its script, a module that it preloads or its accelerators are not there.
    """
    require_runnable(job, here=env)
    require_preload(job, here=env)
    if job.doctor != "off":
        require_accelerators(job, env)


def require_accelerators(job: JobSpec, env: Mapping[str, str]) -> None:
    """Refuse a job whose replica groups need more accelerators than are here, or others.

    A rank with a mask that names no device finds none, and trains on the CPU without a word.

    Raises:
        ConfigError: They are not there.
    """
    from sky_monarch.config.examination import needs_of
    from sky_monarch.doctor.tree import Tree, root_of
    from sky_monarch.doctor.wanted import Wanted, needs, shortfall

    need = needs_of(job.public_dict(), {"local": range(job.replicas)}).get("local")
    if need is None:
        return
    tree = Tree(root_of("local", env))
    wanted = Wanted(devices=need.devices, models=need.kinds, why=needs(need.groups))
    lacking = shortfall(tree, wanted, {**env, **job.envs, **job.secrets})
    if lacking is not None:
        raise ConfigError(
            f"resources.accelerators: on this machine: {lacking.message}",
            hint=f"{lacking.fix} (`doctor: off` in the job starts all the same)",
        )
