"""Which part of a tensor each rank has, against what torch's documentation of DTensor says."""

from __future__ import annotations

import math

import pytest

from sky_monarch.actors.extent import Extent
from sky_monarch.actors.layout import part_of, parts_of

MESH = Extent(["dp", "tp"], [2, 2])


def test_one_dimension_is_cut_into_pieces_rounded_up_and_the_last_may_be_empty():
    assert [part_of((5,), [0], [rank], [4]) for rank in range(4)] == [
        ((0, 2),),
        ((2, 2),),
        ((4, 1),),
        ((5, 0),),
    ]


def test_the_second_dimension_of_a_mesh_cuts_the_pieces_of_the_first():
    assert parts_of((8,), [0, 0], MESH) == [((0, 2),), ((2, 2),), ((4, 2),), ((6, 2),)]
    assert parts_of((2, 5), [1, 1], MESH) == [
        ((0, 2), (0, 2)),
        ((0, 2), (2, 1)),
        ((0, 2), (3, 1)),
        ((0, 2), (4, 1)),
    ]


def test_what_is_not_cut_all_have_alike():
    assert parts_of((4, 6), [None, 1], MESH) == [((0, 4), (0, 3)), ((0, 4), (3, 3))] * 2
    assert parts_of((3,), [None], Extent([], [])) == [((0, 3),)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 8), (5, 2), (0, 4)])
@pytest.mark.parametrize("dims", [[0, 1], [1, 0], [0, 0], [None, 1]])
def test_the_parts_cover_everything_and_only_copies_overlap(shape, dims):
    parts = set(parts_of(shape, dims, MESH))
    cells = sum(math.prod(size for _, size in part) for part in parts)
    assert cells == math.prod(shape)
