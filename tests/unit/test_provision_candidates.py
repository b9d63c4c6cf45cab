"""Which choice is tried next: each once, by one host, and then all stay together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_monarch.provision.candidates import Candidates, Exhausted
from sky_monarch.provision.provider import Kind, Turn

KINDS = st.sampled_from([None, Kind.CAPACITY, Kind.REFUSED, Kind.ERROR])


def restored(candidates: Candidates, count: int, follow=(), homes=()) -> Candidates:
    """As the next process has it, from the file."""
    other = Candidates(count, follow=follow, homes=homes)
    other.restore(json.loads(json.dumps(candidates.to_json())))
    return other


def test_one_host_finds_out_and_the_others_wait_for_it():
    candidates = Candidates(3)

    assert candidates.next("h0", 1) == Turn(choice=0)
    assert candidates.next("h1", 1) is None
    assert candidates.failed("h0", 0, Kind.CAPACITY, "none") is None
    assert candidates.next("h1", 1) is None, "it goes on with the next one"
    assert candidates.next("h0", 1) == Turn(choice=1)
    candidates.up("h0", 1, "oci/x/1")
    assert candidates.next("h1", 1) == Turn(choice=1), "nothing to follow"


def test_whoever_looks_while_another_finds_out_is_replaced_where_that_gives_up():
    candidates = Candidates(2)
    candidates.next("h0", 1)
    candidates.gone("h0")

    assert candidates.next("h1", 1) == Turn(choice=0)


def test_the_first_host_chooses_the_zone_and_when_all_are_gone_the_next_first_one_does():
    candidates = Candidates(2, follow=[True, True])
    candidates.next("h0", 1)
    candidates.up("h0", 0, "oci/a/1")

    assert candidates.next("h1", 1) == Turn(choice=0, infra="oci/a/1")
    candidates.gone("h0")
    assert candidates.next("h0", 2) == Turn(choice=0), "no zone is worth having without a host in it"


def test_where_there_is_nothing_to_find_out_all_start_at_once_and_fail_each_for_itself():
    candidates = Candidates(1)

    assert candidates.next("h0", 1) == candidates.next("h1", 1) == Turn(choice=0)
    over = candidates.failed("h1", 0, Kind.CAPACITY, "full")
    assert over is not None
    assert [reason.text for reason in over.reasons] == ["full"]
    assert candidates.next("h0", 1) == Turn(choice=0)
    assert candidates.next("h1", 2) == Turn(choice=0)


def test_a_verdict_is_for_all_who_took_part_and_for_nobody_who_comes_later():
    candidates = Candidates(2)
    for host in ("h0", "h1"):
        candidates.next(host, 1)
    candidates.failed("h0", 0, Kind.CAPACITY, "full")
    over = candidates.failed("h0", 1, Kind.ERROR, "odd")

    assert isinstance(over, Exhausted)
    assert over.kind is Kind.CAPACITY, "there may be room later"
    assert candidates.next("h1", 1) == over
    assert candidates.next("h1", 1) == over, "however often it asks"
    assert candidates.next("h1", 2) == Turn(choice=0)
    assert candidates.next("h0", 2) is None


def test_what_was_exhausted_a_moment_ago_is_not_tried_again_by_the_next_attempt():
    candidates = Candidates(1, follow=[True], hold_s=10.0)
    candidates.next("h0", 1, 100.0)
    over = candidates.failed("h0", 0, Kind.CAPACITY, "full", 101.0)

    assert over is not None
    assert candidates.next("h0", 2, 102.0) == candidates.next("h1", 1, 110.9) == over
    assert candidates.next("h0", 2, 200.0) == over, "it is over for that attempt"
    assert candidates.next("h0", 3, 111.1) == Turn(choice=0)


def test_a_refused_choice_is_never_tried_again():
    candidates = Candidates(2)
    candidates.next("h0", 1)
    candidates.failed("h0", 0, Kind.REFUSED, "no such flavour")
    candidates.failed("h0", 1, Kind.CAPACITY, "full")

    assert candidates.next("h0", 2) == Turn(choice=1)
    over = candidates.failed("h0", 1, Kind.REFUSED, "gone from the catalog")
    assert over is not None
    assert over.kind is Kind.REFUSED
    assert [reason.text for reason in over.reasons] == ["no such flavour", "gone from the catalog"]
    assert candidates.next("h0", 3) == over


@pytest.mark.parametrize("kind", [Kind.CAPACITY, Kind.REFUSED, Kind.CREDENTIALS, Kind.ERROR])
def test_a_host_that_fails_beside_others_that_are_up_moves_nobody(kind):
    candidates = Candidates(2)
    candidates.next("h0", 1)
    candidates.up("h0", 0, None)

    over = candidates.failed("h1", 0, kind, "no")
    assert over is not None
    assert over.kind is kind
    assert candidates.next("h2", 1) == Turn(choice=0)


@given(
    outcomes=st.lists(KINDS, min_size=1, max_size=4),
    asks=st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=60),
    restart=st.booleans(),
)
def test_in_any_order_of_hosts_each_choice_is_tried_at_most_once_before_one_is_up(outcomes, asks, restart):
    count = len(outcomes)
    follow = [True] * count  # where nothing follows, the only choice is tried by all at once
    candidates = Candidates(count, follow=follow)
    tried: list[int] = []
    up: set[int] = set()
    done: dict[str, object] = {}
    for number in asks:
        candidates.join(f"h{number}", 1)
    for number in asks:
        host = f"h{number}"
        if host in done:
            continue
        if restart:
            candidates = restored(candidates, count, follow)
        turn = candidates.next(host, 1)
        if turn is None:
            continue
        if isinstance(turn, Exhausted):
            done[host] = turn
            continue
        kind = outcomes[turn.choice]
        if not up:
            tried.append(turn.choice)
        if kind is None:
            up.add(turn.choice)
            done[host] = turn
            candidates.up(host, turn.choice, None)
        elif (over := candidates.failed(host, turn.choice, kind, "no")) is not None:
            done[host] = over
    assert tried == sorted(set(tried)), "in order, none twice"
    assert len(up) <= 1, "never in two places"
    if None in outcomes:
        assert all(isinstance(one, Turn) for one in done.values())
    elif done:
        assert {one.kind for one in done.values()} <= {
            Kind.CAPACITY
            if Kind.CAPACITY in outcomes
            else Kind.ERROR
            if Kind.ERROR in outcomes
            else Kind.REFUSED
        }


# --- hosts of different sizes -------------------------------------------------------------------------

SMALL = {"h0": (0,), "h1": (1,), "h2": (2,)}
LARGE = {"h0": (0, 1, 2)}


def test_a_host_that_the_next_place_does_not_need_tries_nothing_there():
    candidates = Candidates(2, homes=[LARGE, SMALL])

    assert candidates.next("h2", 1) is None, "the first place has no such host"
    assert candidates.next("h0", 1) == Turn(choice=0)
    assert candidates.failed("h0", 0, Kind.CAPACITY, "none") is None
    assert candidates.next("h0", 1) == Turn(choice=1)


@pytest.mark.parametrize("restart", [False, True])
def test_a_scout_that_the_next_place_does_not_need_leaves_the_search_to_a_host_that_is_there(restart):
    candidates = Candidates(2, homes=[SMALL, LARGE])
    assert candidates.next("h1", 1) == Turn(choice=0)
    assert candidates.next("h0", 1) is None
    assert candidates.failed("h1", 0, Kind.CAPACITY, "none") is None
    if restart:
        candidates = restored(candidates, 2, homes=[SMALL, LARGE])

    assert candidates.next("h1", 1) is None
    assert candidates.next("h0", 1) == Turn(choice=1), "h1 would wait for itself, and all others for h1"


def test_others_are_launched_only_once_the_controller_has_placed_groups_for_them():
    candidates = Candidates(2, homes=[LARGE, SMALL])
    candidates.next("h0", 1)
    candidates.failed("h0", 0, Kind.CAPACITY, "none")
    candidates.next("h0", 1)
    candidates.up("h0", 1, None)

    assert candidates.next("h1", 1) is None
    candidates = restored(candidates, 2, homes=[LARGE, SMALL])
    candidates.placed(1)
    assert candidates.next("h1", 1) == Turn(choice=1)
    assert restored(candidates, 2, homes=[LARGE, SMALL]).is_placed(1)


def test_an_answer_that_was_on_its_way_while_groups_were_placed_is_not_of_where_they_are():
    """Else the scout takes the third place, which is as the first, for placed: groups would stay as in the second."""
    candidates = Candidates(3, homes=[LARGE, SMALL, LARGE])
    asked = candidates.placings
    candidates.place(1)
    candidates.placed(0, placings=asked)
    assert not candidates.is_placed(2)
    assert not candidates.heard, "it says nothing of hosts there"
    candidates.placed(1, placings=asked)
    assert candidates.heard, "this one was of after that"
    candidates.placed(0, placings=candidates.placings)
    assert candidates.is_placed(2), "and what is asked later is believed, whatever it is"


def test_the_only_choice_left_is_found_out_by_one_where_groups_are_not_placed_for_it():
    candidates = Candidates(2, homes=[LARGE, SMALL])
    candidates.next("h0", 1)
    candidates.failed("h0", 0, Kind.REFUSED, "no")

    assert candidates.next("h0", 1) == Turn(choice=1)
    assert candidates.next("h1", 1) is None


def test_once_a_host_was_up_places_where_groups_lie_otherwise_are_out():
    candidates = Candidates(3, homes=[LARGE, SMALL, SMALL])
    candidates.placed(1)
    candidates.up("h0", 1, None)
    candidates.gone("h0")

    assert candidates.next("h0", 2) == Turn(choice=1)
    assert candidates.failed("h0", 1, Kind.CAPACITY, "none") is None
    assert candidates.next("h0", 2) == Turn(choice=2)
    over = candidates.failed("h0", 2, Kind.CAPACITY, "none")
    assert isinstance(over, Exhausted)
    assert [reason.choice for reason in over.reasons] == [1, 2]
