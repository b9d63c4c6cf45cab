"""Shell completion of what only the state folder knows."""

from __future__ import annotations

__all__ = ["head_places", "run_names", "unended_names"]


def run_names(incomplete: str) -> list[str]:
    """Names of runs, live ones first."""
    return _names(incomplete, ended=True)


def unended_names(incomplete: str) -> list[str]:
    """Names of runs that have not ended: of no others is there anything to scale, to attach to or to end."""
    return _names(incomplete, ended=False)


def head_places(incomplete: str) -> list[str]:
    """Where a head may be."""
    return [place for place in ("here", "cluster") if place.startswith(incomplete)]


def _names(incomplete: str, *, ended: bool) -> list[str]:
    from sky_monarch.launch.folder import Phase, list_runs

    found = [
        (folder.phase() is Phase.ENDED, folder.name)
        for folder in reversed(list_runs())
        if folder.name.startswith(incomplete)
    ]
    found.sort(key=lambda one: one[0])
    return list(dict.fromkeys(name for is_over, name in found if ended or not is_over))
