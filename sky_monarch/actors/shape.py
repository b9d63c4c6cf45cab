"""What all meshes can do with their dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sky_monarch.actors.extent import Extent, Point
from sky_monarch.actors.region import Region

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

__all__ = ["Extent", "Point", "Region", "Shaped"]


class Shaped:
    """A mesh: its members stand in named dimensions, and a part of it is a mesh too.

    A subclass says which region it is (``_region``) and how the same mesh looks with another (``_with_region``), whose
    ranks are always among those that it has.
    """

    __slots__ = ()

    @property
    def _region(self) -> Region:
        raise NotImplementedError

    def _with_region(self, region: Region) -> Self:
        raise NotImplementedError

    @property
    def extent(self) -> Extent:
        """Names and sizes of the dimensions."""
        return self._region.extent

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimensions, by name."""
        return self._region.sizes

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """How many members there are along a dimension, in several together, or in all.

        Raises:
            KeyError: There is no such dimension.
        """
        return self._region.size(dim)

    def slice(self, /, **selection: int | slice) -> Self:
        """Choose along dimensions: an index takes its dimension away, a slice keeps it.

        ``mesh.slice(hosts=3, gpus=slice(2, 6))``

        Raises:
            TypeError: There is no such dimension, or what is chosen is neither an index nor a slice.
            IndexError: An index is out of range; negative ones are.
            ValueError: A slice chooses nothing, or counts down.
        """
        return self._with_region(self._region.slice(**selection))

    def flatten(self, name: str) -> Self:
        """The same members along one dimension.

        Raises:
            ValueError: This is a part of a mesh whose members are not evenly spaced.
        """
        return self._with_region(self._region.flatten(name))

    def split(self, /, **parts: Sequence[str] | int) -> Self:
        """Split dimensions, each into several.

        ``mesh.split(hosts=("dp", "pp"), gpus=("tp", "cp"), pp=16, cp=2)`` makes four dimensions of two. Of the parts of
        each dimension all sizes but one are given; that one is found. What is not named stays as it is.

        Raises:
            ValueError: A size is missing or belongs to no new dimension, sizes do not divide their dimension, or two
                dimensions would have the same name.
        """
        return self._with_region(self._region.split(**parts))

    def rename(self, /, **names: str) -> Self:
        """Rename dimensions: ``mesh.rename(hosts="dp", gpus="tp")``.

        Raises:
            ValueError: There is no such dimension, or two would have the same name.
        """
        return self._with_region(self._region.rename(**names))

    def __len__(self) -> int:
        return len(self._region)
