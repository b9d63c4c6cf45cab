"""Which ranks of a mesh a part of it holds, and in which shape."""

from __future__ import annotations

from itertools import pairwise, product
from operator import index, mul
from typing import TYPE_CHECKING

from sky_monarch.actors.extent import Extent, Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any


class Region:
    """Ranks of a larger mesh, the base, arranged in dimensions of their own.

    It is a sequence of base ranks in row-major order: position ``i`` of a region is rank ``i`` of its extent.

    Args:
        extent: Dimensions of the region.
        offset: Base rank of its first position.
        strides: How far apart in the base two neighbours along each dimension are; by default a block without gaps.

    Raises:
        ValueError: Offset or a stride is negative, strides are not one a dimension, or base ranks would not ascend.
    """

    __slots__ = ("_extent", "_offset", "_strides")

    _extent: Extent
    _offset: int
    _strides: tuple[int, ...]

    def __init__(self, extent: Extent, offset: int = 0, strides: Iterable[int] | None = None) -> None:
        self._extent = extent
        self._offset = index(offset)
        self._strides = extent._strides[1:] if strides is None else tuple(index(each) for each in strides)
        if self._offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if len(self._strides) != len(extent):
            raise ValueError(f"{len(self._strides)} strides, but {len(extent)} dimensions")
        # What makes a base rank occur once, and its place be found by division.
        span = 0
        for size, stride in zip(reversed(extent._sizes), reversed(self._strides), strict=True):
            if size > 1 and stride <= span:
                raise ValueError(f"with strides {list(self._strides)} the ranks of {extent!r} do not ascend")
            span += (size - 1) * stride

    @property
    def extent(self) -> Extent:
        """Dimensions of the region."""
        return self._extent

    @property
    def offset(self) -> int:
        """Base rank of the first position."""
        return self._offset

    @property
    def strides(self) -> list[int]:
        """How far apart in the base two neighbours along each dimension are."""
        return list(self._strides)

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions."""
        return self._extent.labels

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimensions, by name."""
        return dict(self._extent)

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """How many ranks there are along a dimension, in several together, or in all.

        Raises:
            KeyError: There is no such dimension.
        """
        if dim is None:
            return self._extent.nelements
        if isinstance(dim, str):
            if dim not in self._extent:
                raise KeyError(f"no dimension {dim!r} in {self._extent!r}")
            return self._extent[dim]
        total = 1
        for each in dim:
            total *= self.size(each)
        return total

    def slice(self, /, **selection: int | slice) -> Region:
        """Choose along dimensions: an index takes its dimension away, a slice keeps it.

        ``region.slice(hosts=3, gpus=slice(2, 6))``

        Raises:
            TypeError: There is no such dimension, or what is chosen is neither an index nor a slice.
            IndexError: An index is out of range; negative ones are.
            ValueError: A slice chooses nothing, or counts down.
        """
        if unknown := [label for label in selection if label not in self._extent]:
            raise TypeError(f"no dimension {', '.join(map(repr, unknown))} in {self._extent!r}")
        offset = self._offset
        labels, sizes, strides = [], [], []
        for label, size, stride in self._dimensions():
            chosen = selection.get(label, slice(None))
            if not isinstance(chosen, slice):
                at = index(chosen)
                if not 0 <= at < size:
                    raise IndexError(f"{label}={at} is out of range: {label!r} has size {size}")
                offset += at * stride
                continue
            found = range(*chosen.indices(size))
            if found.step < 0:
                raise ValueError(f"a slice of {label!r} counts down, which ranks never do: {chosen}")
            if not found:
                raise ValueError(f"a slice of {label!r}, which has size {size}, chooses nothing: {chosen}")
            offset += found.start * stride
            labels.append(label)
            sizes.append(len(found))
            strides.append(stride * found.step)
        return Region(Extent(labels, sizes), offset, strides)

    def flatten(self, name: str) -> Region:
        """The same ranks along one dimension.

        Raises:
            ValueError: The ranks are not evenly spaced, so one dimension cannot say which they are.
        """
        # A dimension of size 1 has no neighbours, hence no spacing.
        found = [(size, stride) for _, size, stride in self._dimensions() if size > 1]
        for (_, outer), (size, inner) in pairwise(found):
            if outer != size * inner:
                raise ValueError(
                    f"cannot flatten {self._extent!r} to {name!r}: its ranks, {_shown(self)}, are not evenly spaced"
                )
        stride = found[-1][1] if found else 1
        return Region(Extent([name], [len(self)]), self._offset, [stride])

    def split(self, /, **parts: Sequence[str] | int) -> Region:
        """Split dimensions, each into several.

        ``region.split(hosts=("dp", "pp"), gpus=("tp", "cp"), pp=16, cp=2)`` makes four dimensions of two. Of the parts
        of each dimension all sizes but one are given; that one is found. What is not named stays as it is.

        Raises:
            ValueError: A size is missing or belongs to no new dimension, sizes do not divide their dimension, or two
                dimensions would have the same name.
        """
        splits: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for name, value in parts.items():
            if name not in self._extent:
                if not isinstance(value, int):
                    raise ValueError(
                        f"{name!r} is no dimension of {self._extent!r}, and {value!r} no size of a new one"
                    )
                given[name] = value
            elif isinstance(value, str) or not hasattr(value, "__iter__"):
                raise ValueError(f"{name!r} is split into a sequence of names, not {value!r}")
            else:
                splits[name] = tuple(value)
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in self._dimensions():
            into = splits.get(label, (label,))
            found = _sizes_of_parts(label, size, into, given) if label in splits else [size]
            inner = stride * size
            for part in found:
                inner //= part
                strides.append(inner)
            labels.extend(into)
            sizes.extend(found)
        if unused := given.keys() - {name for into in splits.values() for name in into}:
            raise ValueError(f"sizes are given of {sorted(unused)}, which no dimension is split into")
        return Region(Extent(labels, sizes), self._offset, strides)

    def rename(self, /, **names: str) -> Region:
        """Rename dimensions: ``region.rename(hosts="dp", gpus="tp")``.

        Raises:
            ValueError: There is no such dimension, or two would have the same name.
        """
        if unknown := [label for label in names if label not in self._extent]:
            raise ValueError(f"no dimension {', '.join(map(repr, unknown))} in {self._extent!r}")
        labels = [names.get(label, label) for label in self._extent]
        return Region(Extent(labels, self._extent._sizes), self._offset, self._strides)

    def ranks(self) -> list[int]:
        """All base ranks, in row-major order of the region."""
        return list(self)

    def point_of(self, rank: int) -> Point:
        """The place of a base rank in this region.

        Raises:
            ValueError: The region does not hold it.
        """
        position = self._position_of(rank)
        if position is None:
            raise ValueError(f"base rank {rank} is not in {self!r}")
        return Point(position, self._extent)

    def rank_of(self, point: Mapping[str, int]) -> int:
        """The base rank at a place of this region.

        Raises:
            KeyError: A dimension is missing, or there is none of a name given.
            IndexError: An index is out of range.
        """
        steps: Iterator[int] = map(mul, self._extent.indices_of(point), self._strides)
        return self._offset + sum(steps)

    def points(self) -> Iterator[Point]:
        """All places, in row-major order."""
        return self._extent.points()

    def _dimensions(self) -> Iterator[tuple[str, int, int]]:
        """Name, size and stride of each dimension."""
        return zip(self._extent._labels, self._extent._sizes, self._strides, strict=True)

    def _position_of(self, rank: int) -> int | None:
        """Where a base rank stands in row-major order."""
        rest = rank - self._offset
        position = 0
        for _, size, stride in self._dimensions():
            at = 0
            if size > 1:
                at, rest = divmod(rest, stride)
                if not 0 <= at < size:
                    return None
            position = position * size + at
        return position if rest == 0 else None

    def __iter__(self) -> Iterator[int]:
        steps = (range(0, size * stride or 1, stride or 1) for _, size, stride in self._dimensions())
        return (self._offset + sum(step) for step in product(*steps))

    def __getitem__(self, position: int) -> int:
        """The base rank at a position.

        Raises:
            IndexError: There is no such position.
        """
        return self.rank_of(Point(position, self._extent))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._position_of(rank) is not None

    def __len__(self) -> int:
        return self._extent.nelements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        mine = (self._extent, self._offset, self._strides)
        return mine == (other._extent, other._offset, other._strides)

    def __hash__(self) -> int:
        return hash((self._extent, self._offset, self._strides))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Region, (self._extent, self._offset, self._strides))

    def __repr__(self) -> str:
        return f"Region({self._extent!r}, offset={self._offset}, strides={list(self._strides)})"


def _sizes_of_parts(label: str, size: int, into: tuple[str, ...], given: Mapping[str, int]) -> list[int]:
    """The sizes of what a dimension is split into, at most one of them not given."""
    open_names = [name for name in into if name not in given]
    if len(open_names) > 1:
        raise ValueError(
            f"the sizes of {', '.join(map(repr, open_names))} are open: give all but one, for example {open_names[0]}=4"
        )
    known = 1
    for name in into:
        known *= given.get(name, 1)
    if known < 1 or size % known or (not open_names and known != size):
        shown = ", ".join(f"{name}={given.get(name, '?')}" for name in into)
        raise ValueError(f"dimension {label!r} of size {size} cannot be split into {shown}")
    return [given.get(name, size // known) for name in into]


def _shown(region: Region, limit: int = 8) -> str:
    """Some ranks of a region, for a message."""
    ranks = region.ranks()
    more = ", …" if len(ranks) > limit else ""
    return ", ".join(map(str, ranks[:limit])) + more
