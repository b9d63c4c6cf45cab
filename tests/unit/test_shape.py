"""Extents, points and regions, against a model that keeps every place of a mesh with its rank."""

import itertools
import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sky_monarch.actors.shape import Extent, Point, Region

LABELS = ("hosts", "gpus", "tp", "dp")
#: Names that a split or a rename makes; none is among LABELS.
NEW = ("a", "b", "c", "d")

extents = st.lists(st.sampled_from(LABELS), unique=True, max_size=4).flatmap(
    lambda labels: st.tuples(
        st.just(labels), st.lists(st.integers(1, 6), min_size=len(labels), max_size=len(labels))
    )
)


class Model:
    """The same region, as a plain list of base ranks beside the sizes."""

    def __init__(self, labels, sizes, ranks=None):
        self.labels, self.sizes = list(labels), list(sizes)
        self.ranks = list(range(math.prod(sizes))) if ranks is None else ranks

    def places(self):
        return [
            dict(zip(self.labels, at, strict=True))
            for at in itertools.product(*(range(size) for size in self.sizes))
        ]

    def slice(self, selection):
        kept = [label for label in self.labels if not isinstance(selection.get(label, slice(None)), int)]
        chosen = {
            label: [each]
            if isinstance(each := selection.get(label, slice(None)), int)
            else list(range(size))[each]
            for label, size in zip(self.labels, self.sizes, strict=True)
        }
        ranks = [
            rank
            for place, rank in zip(self.places(), self.ranks, strict=True)
            if all(at in chosen[label] for label, at in place.items())
        ]
        return Model(kept, [len(chosen[label]) for label in kept], ranks)


def same(region, model):
    assert region.labels == model.labels
    assert list(region.sizes.values()) == model.sizes
    assert region.ranks() == model.ranks
    assert len(region) == region.size() == len(model.ranks)
    assert [dict(point) for point in region.points()] == model.places()
    assert [region[position] for position in range(len(region))] == model.ranks
    for place, rank in zip(model.places(), model.ranks, strict=True):
        assert region.rank_of(place) == rank
        assert dict(region.point_of(rank)) == place
        assert region.extent.point(region.point_of(rank).rank) == region.point_of(rank)
    everywhere = range(-2, max(model.ranks) + 3)
    assert [rank for rank in everywhere if rank in region] == sorted(model.ranks)


@st.composite
def selections(draw, region):
    found = {}
    for label, size in region.sizes.items():
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size + 2))
        step = draw(st.integers(1, 3))
        negative = slice(start - size, None, step)
        found[label] = draw(st.sampled_from([start, slice(start, stop, step), negative, slice(None), None]))
    return {label: each for label, each in found.items() if each is not None}


@settings(deadline=None, max_examples=50)
@given(extents, st.data())
def test_any_slices_of_slices_hold_the_ranks_that_the_model_says(shape, data):
    region, model = Region(Extent(*shape)), Model(*shape)
    same(region, model)
    for _ in range(2):
        selection = data.draw(selections(region))
        region, model = region.slice(**selection), model.slice(selection)
        same(region, model)


@settings(deadline=None, max_examples=50)
@given(extents, st.data())
def test_a_split_keeps_the_ranks_and_their_order_whatever_was_sliced(shape, data):
    region = Region(Extent(*shape))
    region = region.slice(**data.draw(selections(region)))
    before = region.ranks()
    new, parts, sizes = iter("abcdefghijklmnop"), {}, []
    for label, size in region.sizes.items():
        divisor = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        if data.draw(st.booleans()):
            outer, inner = next(new), next(new)
            parts |= {label: (outer, inner), data.draw(st.sampled_from([inner])): divisor}
            sizes += [(outer, size // divisor), (inner, divisor)]
        else:
            sizes.append((label, size))
    split = region.split(**parts)
    assert list(split.sizes.items()) == sizes
    same(split, Model([label for label, _ in sizes], [size for _, size in sizes], before))


@settings(deadline=None, max_examples=50)
@given(extents, st.data())
def test_flatten_keeps_evenly_spaced_ranks_and_refuses_all_others(shape, data):
    region = Region(Extent(*shape))
    region = region.slice(**data.draw(selections(region)))
    ranks = region.ranks()
    if len({after - before for before, after in itertools.pairwise(ranks)}) <= 1:
        same(region.flatten("ranks"), Model(["ranks"], [len(ranks)], ranks))
    else:
        with pytest.raises(
            ValueError, match=r"cannot flatten .* to 'ranks': its ranks, 0?.* not evenly spaced"
        ):
            region.flatten("ranks")


@settings(deadline=None, max_examples=50)
@given(extents, st.data())
def test_rename_changes_names_only(shape, data):
    region = Region(Extent(*shape))
    region = region.slice(**data.draw(selections(region)))
    names = {label: new for label, new in zip(region.labels, NEW, strict=False) if data.draw(st.booleans())}
    renamed = region.rename(**names)
    assert renamed.ranks() == region.ranks()
    assert renamed.sizes == {names.get(label, label): size for label, size in region.sizes.items()}


@settings(deadline=None, max_examples=50)
@given(extents, st.data())
def test_all_survive_pickle_and_equal_values_have_equal_hashes(shape, data):
    region = Region(Extent(*shape))
    region = region.slice(**data.draw(selections(region)))
    point = region.extent.point(data.draw(st.integers(0, len(region) - 1)))
    for each in (region, region.extent, point):
        again = pickle.loads(pickle.dumps(each))
        assert again == each
        assert hash(again) == hash(each)
        assert repr(again) == repr(each)


def test_a_point_is_a_mapping_with_a_rank():
    point = Extent(["hosts", "gpus"], [2, 8]).point(11)

    assert dict(point) == {"hosts": 1, "gpus": 3}
    assert (point.rank, point.size("gpus"), len(point)) == (11, 8, 2)
    assert point.extent == Extent(["hosts", "gpus"], [2, 8])
    assert point != Extent(["hosts", "gpus"], [4, 8]).point(11)
    assert point.get("tp") is None
    assert "tp" not in point
    assert repr(point) == "{'hosts': 1/2, 'gpus': 3/8}"
    with pytest.raises(KeyError):
        point["tp"]
    with pytest.raises(KeyError):
        point.size("tp")


def test_an_extent_is_a_mapping_whose_order_counts():
    extent = Extent(["hosts", "gpus"], [2, 8])

    assert (
        extent == Extent.of({"hosts": 2, "gpus": 8}) == Extent(["hosts"], [2]).concat(Extent(["gpus"], [8]))
    )
    assert extent != Extent(["gpus", "hosts"], [8, 2])
    assert (extent.labels, extent.sizes, extent.nelements, len(extent)) == (["hosts", "gpus"], [2, 8], 16, 2)
    assert extent["gpus"] == 8
    assert "tp" not in extent
    assert repr(extent) == "{hosts: 2, gpus: 8}"
    assert Extent([], []).nelements == 1
    assert dict(Extent([], []).point(0)) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Extent(["a"], [1, 2]), "1 labels, but 2 sizes"),
        (lambda: Extent(["a", "a"], [1, 2]), r"a dimension occurs twice in \['a', 'a'\]"),
        (lambda: Extent(["a"], [0]), "dimension 'a' has size 0: at least 1"),
        (lambda: Extent([""], [1]), "the name of a dimension is empty"),
        (lambda: Extent(["a"], [2]).concat(Extent(["a"], [2])), "occurs twice"),
        (lambda: Region(Extent(["a"], [2]), -1), "offset -1 is negative"),
        (lambda: Region(Extent(["a"], [2]), 0, []), "0 strides, but 1 dimensions"),
        (lambda: Region(Extent(["a", "b"], [2, 3]), 0, [2, 1]), "do not ascend"),
        (lambda: Region(Extent(["a"], [2]), 0, [0]), "do not ascend"),
        (lambda: Region(Extent(["a"], [4])).slice(a=slice(2, 2)), "'a', which has size 4, chooses nothing"),
        (lambda: Region(Extent(["a"], [4])).slice(a=slice(None, None, -1)), "counts down"),
        (lambda: Region(Extent(["a"], [4])).split(a=("b", "c")), "'b', 'c' are open"),
        (lambda: Region(Extent(["a"], [4])).split(a=("b", "c"), c=3), "size 4 cannot be split into b=., c=3"),
        (lambda: Region(Extent(["a"], [4])).split(a=("b", "c"), b=2, c=4), "cannot be split into b=2, c=4"),
        (lambda: Region(Extent(["a"], [4])).split(a=("b", "c"), b=0, c=4), "cannot be split"),
        (lambda: Region(Extent(["a"], [4])).split(a="b"), "'a' is split into a sequence of names, not 'b'"),
        (lambda: Region(Extent(["a"], [4])).split(b=("c",)), "'b' is no dimension of {a: 4}"),
        (lambda: Region(Extent(["a"], [4])).split(a=("b", "c"), c=2, d=2), r"\['d'\], which no dimension"),
        (lambda: Region(Extent(["a", "b"], [4, 2])).split(a=("b", "c"), c=2), "occurs twice"),
        (lambda: Region(Extent(["a", "b"], [4, 2])).rename(a="b"), "occurs twice"),
        (lambda: Region(Extent(["a"], [4])).rename(b="c"), "no dimension 'b'"),
        (lambda: Region(Extent(["a"], [4])).slice(a=2).point_of(3), "base rank 3 is not in"),
    ],
)
def test_what_is_no_shape_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda region: region.slice(tp=1), TypeError, "no dimension 'tp' in {hosts: 2, gpus: 8}"),
        (lambda region: region.slice(gpus="all"), TypeError, "interpreted as an integer"),
        (lambda region: region.slice(gpus=8), IndexError, "gpus=8 is out of range: 'gpus' has size 8"),
        (lambda region: region.slice(gpus=-1), IndexError, "gpus=-1 is out of range"),
        (lambda region: region[16], IndexError, "rank 16 is out of range"),
        (lambda region: region.size("tp"), KeyError, "no dimension 'tp'"),
        (lambda region: region.rank_of({"hosts": 0}), KeyError, "no index given for dimension 'gpus'"),
        (lambda region: region.rank_of({"hosts": 0, "gpus": 0, "tp": 0}), KeyError, "no dimension 'tp'"),
        (lambda region: region.rank_of({"hosts": 0, "gpus": 8}), IndexError, "gpus=8 is out of range"),
        (lambda region: Point(16, region.extent), IndexError, "rank 16 is out of range"),
        (lambda region: Point(1.5, region.extent), TypeError, "interpreted as an integer"),
        (lambda region: Extent([1], [1]), TypeError, "the name of a dimension is a string, not 1"),
    ],
)
def test_a_place_outside_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(Region(Extent(["hosts", "gpus"], [2, 8])))


def test_sizes_multiply_over_several_dimensions():
    region = Region(Extent(["hosts", "gpus", "tp"], [2, 3, 4]))
    assert (region.size(), region.size("gpus"), region.size(["hosts", "tp"]), region.size([])) == (
        24,
        3,
        8,
        1,
    )


def test_shapes_bring_in_nothing_that_an_actor_process_would_wait_for():
    code = (
        "import sys, collections.abc, itertools, operator, typing; import sky_monarch.actors; "
        "before = set(sys.modules); "
        "import sky_monarch.actors.shape, sky_monarch.actors.value_mesh; print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    names = ("extent", "region", "shape", "value_mesh")
    assert found.stdout.split() == [f"sky_monarch.actors.{name}" for name in names]
