"""How a cluster becomes the head of a run: ``python -m sky_monarch.agent --enrol FOLDER``, told that it is one.

It plans itself, with the paths and the address that it has, and writes the files that a head on the launching machine
would have. What is secret lies in ``private.json`` alone, a file of this user.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from sky_monarch.enrolment import documents
from sky_monarch.errors import SystemCallError
from sky_monarch.launch.address import head_address
from sky_monarch.launch.folder import write_json
from sky_monarch.launch.head import plan_head

__all__ = ["become_head"]


def become_head(folder: Path, environ: MutableMapping[str, str], *, version: str) -> Path:
    """Write the files of a head.

    Args:
        folder: Where they go; made where it is missing. Absolute.
        environ: Holds the two variables of an enrolment, which are removed from it.
        version: Of this installation.

    Returns:
        Path of ``agent.json``.

    Raises:
        ConfigError: A variable is missing or damaged, or this installation is not the launcher's.
        SystemCallError: The files could not be written.
    """
    told, secret = documents(environ, version=version)
    plan = plan_head(
        told,
        secret,
        run_dir=folder,
        temporary=Path(tempfile.gettempdir()),
        python=sys.executable,
        path=environ.get("PATH", ""),
        address=head_address(told["head"].get("address")),
    )
    try:
        for place in (folder, plan.socket_dir):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.chmod(0o700)  # refused for a folder of somebody else, who may have made it first
        write_json(folder / "run.json", plan.run_json)
        for name, content in plan.files.items():
            write_json(folder / name, content)
    except OSError as error:
        text = f"{folder} cannot be used for the head's files: {error.strerror}"
        raise SystemCallError(text) from error
    return folder / "agent.json"
