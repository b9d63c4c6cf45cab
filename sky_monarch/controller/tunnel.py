"""What has gone through the tunnel, where hosts reach each other through the head alone."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["tunnelled_bytes"]


def tunnelled_bytes(run_dir: Path) -> int | None:
    """Bytes that the head's relay has passed on, of all hosts and both ways; None where there is none.

    Args:
        run_dir: The run's folder, with the file that the relay writes every few seconds.
    """
    try:
        hosts = json.loads((run_dir / "tunnel.json").read_bytes())["hosts"]
        return sum(int(one["sent"]) + int(one["received"]) for one in hosts.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # of a run without a tunnel, for one
