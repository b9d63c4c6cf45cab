"""Which part of a sharded tensor each rank has. As torch's DTensor has it; nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sky_monarch.actors.extent import Extent, Point

__all__ = ["Part", "part_of", "parts_of"]

#: ``(start, size)`` along each dimension of the tensor.
Part = tuple[tuple[int, int], ...]


def part_of(
    shape: Sequence[int], dims: Sequence[int | None], point: Sequence[int], sizes: Sequence[int]
) -> Part:
    """The part of a tensor at one place of a mesh.

    A dimension is cut into pieces of equal size, rounded up, so the last ones may be smaller, or empty. Where two
    dimensions of the mesh cut the same one, the second cuts the pieces of the first.

    Args:
        shape: Of the whole tensor.
        dims: Of each dimension of the mesh the dimension of the tensor that it cuts; None where all have the same.
        point: The place, an index along each dimension of the mesh.
        sizes: Of the mesh.
    """
    part = [(0, size) for size in shape]
    for dim, at, count in zip(dims, point, sizes, strict=True):
        if dim is None:
            continue
        start, size = part[dim]
        piece = -(-size // count)
        first = min(at * piece, size)
        part[dim] = (start + first, min(piece, size - first))
    return tuple(part)


def parts_of(shape: Sequence[int], dims: Sequence[int | None], extent: Extent) -> list[Part]:
    """Of each rank of a mesh, in row-major order."""
    sizes = tuple(extent.sizes) or (1,)
    points: list[Point] = list(extent.points())
    return [part_of(shape, dims, tuple(point.values()) or (0,), sizes) for point in points]
