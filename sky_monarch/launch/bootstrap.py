"""What a host's task does: set up sky-monarch beside the host's own torch, and run the agent. A head's does the same.

The text is the same for every host of every job. What differs comes in the task's variables: neither a secret nor a
value of the job is ever part of it. The work itself is done by ``host.sh``, which is shipped beside the wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["HEAD_RUN", "HEAD_SETUP", "HOST_SCRIPT", "RUN", "SETUP", "shipped"]

HOST_SCRIPT = Path(__file__).with_name("host.sh")
"""Prepares a host, and becomes its agent."""

_CALL = 'bash "$HOME/.sky-monarch/ship/$SKY_MONARCH_SHIP/host.sh" '

SETUP = f"{_CALL}setup\n"
"""``setup`` of a host's task."""

HEAD_SETUP = f"{_CALL}setup-head\n"
"""``setup`` of a head's: what the controller needs as well, and no torch."""

RUN = f"exec {_CALL}run\n"
"""``run`` of a host's task: the agent, in the working folder."""

HEAD_RUN = f"exec {_CALL}run-head\n"
"""``run`` of a head's."""


def shipped(task: Mapping[str, Any], *, ship_id: str, files: Path, workdir: Path | None) -> dict[str, Any]:
    """A host's task with what it brings along.

    Args:
        task: As the plan has it.
        ship_id: Names what is shipped.
        files: Folder with the wheel and ``host.sh``.
        workdir: Copy of the working folder; None where nothing of the job runs.
    """
    envs = {**task.get("envs", {}), "SKY_MONARCH_SHIP": ship_id}
    mounts = {**task.get("file_mounts", {}), f"~/.sky-monarch/ship/{ship_id}": str(files)}
    whole = {**task, "file_mounts": mounts, "envs": envs}
    return whole if workdir is None else {**whole, "workdir": str(workdir)}
