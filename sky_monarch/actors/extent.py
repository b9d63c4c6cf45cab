"""Named sizes of a mesh, and a place in it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import index, mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, Self

    from sky_monarch.actors.region import Region


class Extent(Mapping[str, int]):
    """The dimensions of a mesh, in order, each with its size: ``{"hosts": 2, "gpus": 8}``.

    A mapping of names to sizes, so ``len(extent)`` counts dimensions; ``extent.nelements`` counts ranks. The last
    dimension varies fastest. An extent without dimensions has one rank.

    Args:
        labels: Names of the dimensions, each once.
        sizes: As many sizes, each at least 1.

    Raises:
        TypeError: A label is no string, or a size no integer.
        ValueError: Labels and sizes differ in number, a label is empty or occurs twice, or a size is below 1.
    """

    __slots__ = ("_labels", "_sizes", "_strides")

    _labels: tuple[str, ...]
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]

    def __init__(self, labels: Iterable[str], sizes: Iterable[int]) -> None:
        self._labels = tuple(labels)
        self._sizes = tuple(index(size) for size in sizes)
        if len(self._labels) != len(self._sizes):
            raise ValueError(f"{len(self._labels)} labels, but {len(self._sizes)} sizes")
        for label, size in zip(self._labels, self._sizes, strict=True):
            if not isinstance(label, str):
                raise TypeError(f"the name of a dimension is a string, not {label!r}")
            if not label:
                raise ValueError("the name of a dimension is empty")
            if size < 1:
                raise ValueError(f"dimension {label!r} has size {size}: at least 1 is needed")
        if len(set(self._labels)) != len(self._labels):
            raise ValueError(f"a dimension occurs twice in {list(self._labels)}")
        # Of each dimension, how far apart two neighbours are in row-major order; before all, the number of ranks.
        self._strides = tuple(accumulate(reversed(self._sizes), mul, initial=1))[::-1]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        """Make an extent of a mapping of names to sizes, in its order."""
        return cls(sizes.keys(), sizes.values())

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """How many ranks there are."""
        return self._strides[0]

    @property
    def region(self) -> Region:
        """All ranks, ``0`` to ``nelements - 1``, in this shape."""
        from sky_monarch.actors.region import Region

        return Region(self)

    def point(self, rank: int) -> Point:
        """The place of a rank.

        Raises:
            IndexError: There is no such rank.
        """
        return Point(rank, self)

    def points(self) -> Iterator[Point]:
        """All places, by rank."""
        return (Point(rank, self) for rank in range(self.nelements))

    def rank_of(self, point: Mapping[str, int]) -> int:
        """The rank at a place.

        Args:
            point: One index for each dimension.

        Raises:
            KeyError: A dimension is missing, or there is none of a name given.
            IndexError: An index is out of range.
        """
        if isinstance(point, Point) and point.extent == self:
            return point.rank
        return sum(map(mul, self.indices_of(point), self._strides[1:]))

    def indices_of(self, point: Mapping[str, int]) -> tuple[int, ...]:
        """The indices of a place in the order of the dimensions, checked as by :meth:`rank_of`."""
        if unknown := [label for label in point if label not in self._labels]:
            raise KeyError(f"no dimension {', '.join(map(repr, unknown))} in {self!r}")
        if missing := [label for label in self._labels if label not in point]:
            raise KeyError(f"no index given for dimension {', '.join(map(repr, missing))} of {self!r}")
        indices = tuple(index(point[label]) for label in self._labels)
        for label, size, at in zip(self._labels, self._sizes, indices, strict=True):
            if not 0 <= at < size:
                raise IndexError(f"{label}={at} is out of range: {label!r} has size {size}")
        return indices

    def concat(self, other: Extent) -> Extent:
        """Both, the dimensions of ``other`` inside of these: hosts, and then the processes of each.

        Raises:
            ValueError: Both have a dimension of the same name.
        """
        return Extent(self._labels + other._labels, self._sizes + other._sizes)

    def __getitem__(self, label: str) -> int:
        if label not in self._labels:
            raise KeyError(label)
        return self._sizes[self._labels.index(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        # The order of the dimensions counts, as it does not between two dictionaries.
        if not isinstance(other, Extent):
            return NotImplemented
        return self._labels == other._labels and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Extent, (self._labels, self._sizes))

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{label}: {size}' for label, size in self.items())}}}"


class Point(Mapping[str, int]):
    """A place in an extent: a mapping of each dimension to the index along it.

    Args:
        rank: Which one of the extent's ranks, in row-major order.
        extent: The dimensions.

    Raises:
        IndexError: The extent has no such rank.
    """

    __slots__ = ("_extent", "_rank")

    _extent: Extent
    _rank: int

    def __init__(self, rank: int, extent: Extent) -> None:
        self._rank = index(rank)
        self._extent = extent
        if not 0 <= self._rank < extent.nelements:
            raise IndexError(f"rank {rank} is out of range: {extent!r} has {extent.nelements}")

    @property
    def rank(self) -> int:
        """Which one of the extent's ranks this is."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The dimensions."""
        return self._extent

    def size(self, label: str) -> int:
        """The size of a dimension.

        Raises:
            KeyError: There is no such dimension.
        """
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        extent = self._extent
        if label not in extent._labels:
            raise KeyError(label)
        at = extent._labels.index(label)
        return self._rank % extent._strides[at] // extent._strides[at + 1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return self._rank == other._rank and self._extent == other._extent

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Point, (self._rank, self._extent))

    def __repr__(self) -> str:
        places = (f"{label!r}: {at}/{self._extent[label]}" for label, at in self.items())
        return f"{{{', '.join(places)}}}"
