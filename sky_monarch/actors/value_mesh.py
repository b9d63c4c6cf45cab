"""What the members of a mesh answered."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Generic, TypeVar

from sky_monarch.actors.extent import Extent, Point
from sky_monarch.actors.region import Region
from sky_monarch.actors.shape import Shaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

R = TypeVar("R")


class ValueMesh(Shaped, Generic[R]):
    """A value for each rank of a mesh, as ``call`` returns them.

    ``for point, value in values.items()`` goes through all; ``values.item(hosts=0, gpus=3)`` is one of them, and
    ``values.slice(hosts=0)`` a mesh of some. A part counts its ranks anew, from 0.

    Args:
        extent: Dimensions of the mesh.
        values: One for each rank, in row-major order.

    Raises:
        ValueError: There are more or fewer values than ranks.
    """

    __slots__ = ("_extent", "_values")

    _extent: Extent
    _values: list[R]

    def __init__(self, extent: Extent, values: Iterable[R]) -> None:
        self._extent = extent
        self._values = list(values)
        if len(self._values) != extent.nelements:
            raise ValueError(f"{len(self._values)} values, but {extent!r} has {extent.nelements} ranks")

    def get(self, rank: int) -> R:
        """The value of a rank of this mesh.

        Raises:
            IndexError: There is no such rank.
        """
        at = index(rank)
        if not 0 <= at < len(self._values):
            raise IndexError(f"rank {rank} is out of range: {self._extent!r} has {len(self._values)}")
        return self._values[at]

    def item(self, /, **point: int) -> R:
        """The value at a place: ``values.item(hosts=0, gpus=3)``; without dimensions, the only one.

        Raises:
            KeyError: A dimension is missing, or there is none of a name given.
            IndexError: An index is out of range.
        """
        return self._values[self._extent.rank_of(point)]

    def items(self) -> Iterator[tuple[Point, R]]:
        """Each place with its value, by rank."""
        return zip(self._extent.points(), self._values, strict=True)

    def values(self) -> Iterator[R]:
        """The values, by rank."""
        return iter(self._values)

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def _region(self) -> Region:
        return Region(self._extent)

    def _with_region(self, region: Region) -> ValueMesh[R]:
        return ValueMesh(region.extent, [self._values[rank] for rank in region])

    def __reduce__(self) -> tuple[Any, ...]:
        return (ValueMesh, (self._extent, self._values))

    def __repr__(self) -> str:
        from pprint import pformat
        from textwrap import indent

        return f"ValueMesh({self._extent!r}):\n{indent(pformat(tuple(self.items())), '  ')}"
