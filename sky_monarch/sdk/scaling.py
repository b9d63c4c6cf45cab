"""What another number of replica groups changes in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.folder import Phase, RunFolder

__all__ = ["Scaled", "require_live", "scale_body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The answer of a run that was asked for another number of replica groups.

    Attributes:
        previous: Groups that it had to have.
        replicas: Groups that it has to have now; with ``dry_run``: would have.
        changed: Whether that was anything new.
        dry_run: Whether nothing was done.
        start: Groups that start.
        stop: Groups that finish their step and leave.
        launch: Hosts that are asked for.
        end: Hosts that are taken down once nothing is left on them.
        notes: What else to know.
    """

    previous: int
    replicas: int
    changed: bool = False
    dry_run: bool = False
    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    launch: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scaled:
        """Read the API's answer; what a newer version adds is passed over."""
        lists = {name: tuple(value.get(name) or ()) for name in ("start", "stop", "launch", "end", "notes")}
        return cls(
            previous=int(value["previous"]),
            replicas=int(value["replicas"]),
            changed=bool(value.get("changed")),
            dry_run=bool(value.get("dry_run")),
            **lists,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "previous": self.previous,
            "replicas": self.replicas,
            "changed": self.changed,
            "dry_run": self.dry_run,
            **{name: list(getattr(self, name)) for name in ("start", "stop", "launch", "end", "notes")},
        }


def scale_body(replicas: int, *, dry_run: bool, reason: str) -> dict[str, Any]:
    """What the API is asked.

    Raises:
        ConfigError: It is no number of groups.
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(
            f"replicas is {replicas!r}, not a whole number of at least 1",
            hint="`sky-monarch down` ends a run",
        )
    return {"replicas": replicas, "dry_run": dry_run, "reason": reason}


def require_live(folder: RunFolder) -> None:
    """Refuse a run that nobody keeps any more.

    Raises:
        ConfigError: It has ended, or was lost.
    """
    phase = folder.phase()
    if phase is Phase.ENDED:
        state = (folder.final or {}).get("state", "ended")
        raise ConfigError(
            f"{folder.run_id} has ended ({state})",
            hint="set replicas in the job file, and start it again with `sky-monarch up`",
        )
    if phase is Phase.LOST:
        raise ConfigError(
            f"{folder.run_id} was lost: its agent died",
            hint=f"`sky-monarch attach {folder.name}` takes it up again",
        )
