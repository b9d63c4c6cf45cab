"""The values of a mesh, by rank, by place, and in parts."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sky_monarch.actors.shape import Extent, Region
from sky_monarch.actors.value_mesh import ValueMesh


def mesh(**sizes):
    extent = Extent.of(sizes)
    return ValueMesh(extent, [f"v{rank}" for rank in range(extent.nelements)])


def test_values_are_found_by_rank_and_by_place():
    values = mesh(hosts=2, gpus=3)

    assert (values.get(4), values.item(hosts=1, gpus=1), len(values)) == ("v4", "v4", 6)
    assert (values.sizes, values.extent, values.size("gpus")) == (
        {"hosts": 2, "gpus": 3},
        Extent(["hosts", "gpus"], [2, 3]),
        3,
    )
    assert [(dict(point), point.rank, value) for point, value in values.items()][4] == (
        {"hosts": 1, "gpus": 1},
        4,
        "v4",
    )
    assert list(values) == list(values.items())
    assert list(values.values()) == [f"v{rank}" for rank in range(6)]


def test_a_part_counts_its_ranks_anew_and_can_be_flattened():
    part = mesh(hosts=2, gpus=4).slice(gpus=slice(1, 3))

    assert list(part.values()) == ["v1", "v2", "v5", "v6"]
    assert part.get(2) == part.item(hosts=1, gpus=0) == "v5"
    flat = part.flatten("rank")
    assert [(point.rank, point["rank"], value) for point, value in flat.items()] == [
        (0, 0, "v1"),
        (1, 1, "v2"),
        (2, 2, "v5"),
        (3, 3, "v6"),
    ]
    assert mesh(hosts=2, gpus=4).slice(hosts=1, gpus=2).item() == "v6"
    assert mesh(hosts=4).split(hosts=("dp", "pp"), pp=2).rename(dp="x").item(x=1, pp=0) == "v2"


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_part_has_the_values_of_its_region(a, b, c, data):
    extent = Extent(["a", "b", "c"], [a, b, c])
    selection = {"b": data.draw(st.integers(0, b - 1)), "c": slice(data.draw(st.integers(0, c - 1)), None, 2)}
    part = ValueMesh(extent, range(extent.nelements)).slice(**selection)
    assert list(part.values()) == Region(extent).slice(**selection).ranks()


def test_values_survive_pickle_and_show_where_they_come_from():
    values = pickle.loads(pickle.dumps(mesh(gpus=2)))
    assert repr(values) == "ValueMesh({gpus: 2}):\n  (({'gpus': 0/2}, 'v0'), ({'gpus': 1/2}, 'v1'))"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: ValueMesh(Extent(["gpus"], [2]), [1]), ValueError, "1 values, but {gpus: 2} has 2 ranks"),
        (lambda: mesh(gpus=2).get(2), IndexError, "rank 2 is out of range"),
        (lambda: mesh(gpus=2).get(-1), IndexError, "rank -1 is out of range"),
        (lambda: mesh(gpus=2).item(), KeyError, "no index given for dimension 'gpus'"),
        (lambda: mesh(gpus=2).item(gpus=0, tp=0), KeyError, "no dimension 'tp'"),
        (lambda: mesh(gpus=2).item(gpus=2), IndexError, "gpus=2 is out of range"),
    ],
)
def test_a_value_that_is_not_there_is_refused_by_name(use, error, message):
    with pytest.raises(error, match=message):
        use()
