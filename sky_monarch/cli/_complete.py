"""Shell completion of what only the state folder knows."""

from __future__ import annotations

__all__ = ["run_names"]


def run_names(incomplete: str) -> list[str]:
    """Names of runs, live ones first."""
    from sky_monarch.launch.folder import Phase, list_runs

    folders = [folder for folder in reversed(list_runs()) if folder.name.startswith(incomplete)]
    folders.sort(key=lambda folder: folder.phase() is Phase.ENDED)
    return list(dict.fromkeys(folder.name for folder in folders))
