"""Where the running code is: which actor, and which rank of the mesh that was called."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.extent import Extent, Point

if TYPE_CHECKING:
    from sky_monarch.actors.hosting import Hosted

__all__ = ["Context", "context", "current_rank", "current_size"]


@dataclass(frozen=True, slots=True)
class Context:
    """Where the running code is.

    Attributes:
        message_rank: Where this actor stands in the mesh that was called; 0 of an empty extent outside of actors.
        actor_name: The name that its mesh was given; ``client`` outside of actors.
        hosted: What runs the actor; None outside of actors.
    """

    message_rank: Point
    actor_name: str
    hosted: Hosted | None = None

    @property
    def actor_instance(self) -> Any:
        """The actor itself; None outside of actors."""
        return None if self.hosted is None else self.hosted.instance


_OUTSIDE = Context(message_rank=Point(0, Extent((), ())), actor_name="client")
current: ContextVar[Context] = ContextVar("sky_monarch_actor", default=_OUTSIDE)


def context() -> Context:
    """Where the running code is."""
    return current.get()


def current_rank() -> Point:
    """Where this actor stands in the mesh that was called: ``current_rank()["gpus"]``, ``current_rank().rank``."""
    return current.get().message_rank


def current_size() -> dict[str, int]:
    """Sizes of the mesh that was called, by dimension."""
    extent = current.get().message_rank.extent
    return dict(extent.items())


#: How the name of a dimension is written where these characters part names: any name will do.
_WRITTEN = str.maketrans({"%": "%25", ",": "%2C", "|": "%7C", "\t": "%09"})


def place_of(rank: int, extent: Extent) -> str:
    """A point as text, for the header of a message."""
    labels = ",".join(label.translate(_WRITTEN) for label in extent.labels)
    return "|".join((str(rank), labels, ",".join(map(str, extent.sizes))))


def point_at(place: str) -> Point:
    """The point of such a text."""
    rank, labels, sizes = place.split("|")
    if not labels:
        return Point(int(rank), Extent((), ()))
    names = labels.split(",")
    if "%" in labels:
        for written, char in (("%2C", ","), ("%7C", "|"), ("%09", "\t"), ("%25", "%")):
            names = [name.replace(written, char) for name in names]
    return Point(int(rank), Extent(names, map(int, sizes.split(","))))
