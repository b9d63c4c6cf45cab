"""Groups on hosts, for every size there can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sky_monarch.launch.placement import (
    Shape,
    attempt_of,
    cluster_name,
    head_name,
    host_name,
    host_sets,
    shape_of,
)

sizes = st.integers(1, 8)


@settings(max_examples=100, deadline=None)
@given(replicas=st.integers(1, 300), gpus=st.integers(1, 64), per_host=sizes)
def test_each_group_lies_on_exactly_as_many_clusters_as_it_needs(replicas, gpus, per_host):
    shape = shape_of(replicas=replicas, gpus=gpus, per_host=per_host)

    if shape is None:
        assert gpus > per_host
        assert gpus % per_host
        return
    hosts = host_sets("job", replicas=replicas, shape=shape)
    assert [group for host in hosts if host.node == 0 for group in host.groups] == list(range(replicas))
    assert all(len(host.groups) * gpus <= host.nodes * per_host for host in hosts)
    assert len(hosts) == shape.hosts
    assert sum(host.node == 0 for host in hosts) == shape.sets
    assert len({host.cluster for host in hosts}) == len(hosts)
    assert shape.unused == shape.hosts * per_host - replicas * gpus


@settings(max_examples=60, deadline=None)
@given(replicas=st.integers(1, 300), gpus=sizes, per_host=sizes)
def test_groups_are_spread_evenly_over_as_few_hosts_as_hold_them(replicas, gpus, per_host):
    shape = shape_of(replicas=replicas, gpus=gpus, per_host=per_host)
    if shape is None:
        return
    hosts = host_sets("job", replicas=replicas, shape=shape)

    filled = [len(host.groups) for host in hosts]
    assert max(filled) - min(filled) <= 1
    assert sorted(filled, reverse=True) == filled
    if gpus <= per_host:
        assert (shape.sets - 1) * (per_host // gpus) < replicas, "one host less would not do"
        assert all(host.nodes == 1 for host in hosts), "a group that fits into a host is never split"


@pytest.mark.parametrize("replicas", [1, 2, 40])
def test_names_follow_the_pattern_and_are_unique(replicas):
    shape = shape_of(replicas=replicas, gpus=8, per_host=8)
    assert shape is not None

    names = [host.cluster for host in host_sets("a-job", replicas=replicas, shape=shape)]
    assert names == [f"a-job-h{number}" for number in range(replicas)]


def test_a_group_that_needs_several_hosts_has_a_cluster_for_each_of_them():
    shape = shape_of(replicas=2, gpus=16, per_host=8)
    assert shape is not None

    hosts = host_sets("j", replicas=2, shape=shape)
    assert [(host.cluster, host.groups, host.node, host.nodes) for host in hosts] == [
        ("j-h0", (0,), 0, 2),
        ("j-h1", (0,), 1, 2),
        ("j-h2", (1,), 0, 2),
        ("j-h3", (1,), 1, 2),
    ]


def test_without_gpus_each_group_has_a_host():
    shape = shape_of(replicas=3, gpus=0, per_host=0)
    assert shape is not None

    assert [host.groups for host in host_sets("j", replicas=3, shape=shape)] == [(0,), (1,), (2,)]


def test_each_attempt_at_a_host_has_a_cluster_name_of_its_own_and_is_known_by_it() -> None:
    names = [cluster_name("a-job-h0", attempt) for attempt in range(1, 1200)]
    assert names[:2] == ["a-job-h0", "a-job-h0-a2"]
    assert [attempt_of(name, "a-job-h0") for name in names] == list(range(1, 1200))
    for other in (
        "a-job-h01",
        "a-job-h0-a",
        "a-job-h0-a1",
        "a-job-h0-a02",
        "a-job-h0-ax",
        "job-h0",
        "a-job-h",
    ):
        assert attempt_of(other, "a-job-h0") is None


def test_attempts_at_a_host_with_a_long_name_differ_in_what_every_place_keeps_of_it() -> None:
    host = f"{'long-' * 7}named-h12"
    names = [cluster_name(host, attempt) for attempt in (2, 3, 1000)]
    assert [len(name) for name in names] == [33, 33, 33]
    assert len(set(names)) == 3
    assert [attempt_of(name, host) for name in names] == [2, 3, 1000]
    assert attempt_of(names[0], host.replace("h12", "h13")) is None


def test_jobs_with_long_names_that_begin_alike_share_no_name_in_any_place() -> None:
    """42 characters are what Azure and Kubernetes take, SkyPilot adds 9, and cuts the end of what is longer off."""
    jobs = [f"{'pretraining-of-a-large-model-' * 2}{number}" for number in range(20)]
    shape = shape_of(replicas=12, gpus=8, per_host=8)
    assert shape is not None
    names = [name for job in jobs for name in (head_name(job), *_names(job, shape))]

    assert max(map(len, names)) <= 33
    assert len(set(names)) == len(names) == 20 * 13
    assert all(attempt_of(name, name) == 1 for name in names)
    again = [cluster_name(name, 2) for name in names]
    assert max(map(len, again)) <= 33
    assert len({*names, *again}) == 2 * len(names)


def test_a_name_that_every_place_keeps_as_it_is_stays_as_it_is() -> None:
    job = "x" * 28
    assert (host_name(job, 999), head_name(job)) == (f"{job}-h999", f"{job}-head")
    assert host_name(f"{job}x", 0) != f"{job}x-h0"


def _names(job: str, shape: Shape) -> list[str]:
    return [host.cluster for host in host_sets(job, replicas=12, shape=shape)]


def test_spare_hosts_come_last_and_have_no_groups() -> None:
    shape = Shape(gpus=8, groups=2, nodes=1, sets=2, unused=0)
    found = host_sets("a", replicas=3, shape=shape, spare=2)
    assert [(host.cluster, host.groups) for host in found] == [
        ("a-h0", (0, 1)),
        ("a-h1", (2,)),
        ("a-h2", ()),
        ("a-h3", ()),
    ]
