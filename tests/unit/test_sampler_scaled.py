"""A run that is scaled, at any step, the first included: no sample is committed twice, and none is passed over."""

from __future__ import annotations

import random

import pytest

from sky_monarch.training.sampler import Sampler

pytestmark = pytest.mark.torch


def group(replica: int, *, started_with: int, ranks: int) -> list[Sampler]:
    """The ranks of a group, which know how many groups there were to be when they started."""
    found = [Sampler(4001, 3) for _ in range(ranks)]
    for rank, one in enumerate(found):
        one.bind(seed=5, replica=replica, replicas=started_with, rank=rank, world_size=ranks)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_history_of_scaling_commits_a_sample_twice_or_passes_one_over(seed: int) -> None:
    dice = random.Random(seed)
    ranks = dice.randint(1, 2)
    number = dice.randint(1, 3)
    live = {replica: group(replica, started_with=number, ranks=ranks) for replica in range(number)}
    committed: list[int] = []
    step = 0
    while step < 60:
        number = dice.choice([number, number, dice.randint(1, 7)])
        for replica in sorted(live, reverse=True):
            if replica >= number and len(live) > 1:
                del live[replica]  # it has finished its step, and leaves in order
        newcomers = {
            replica: group(replica, started_with=number, ranks=ranks)
            for replica in range(number)
            if replica not in live and dice.random() < 0.5
        }
        if step == 0:
            live |= newcomers  # nobody heals at the first step: all compute
            newcomers = {}
        drawn = {replica: [one.batch_number for one in samplers] for replica, samplers in live.items()}
        while dice.random() < 0.1 and len(live) > 1:
            live.pop(dice.choice(sorted(live)))  # dies after it has drawn
        donor = live[min(live)][0].state_dict()
        for samplers in newcomers.values():
            for one in samplers:
                one.load_state_dict(donor)
        counts = {replica: sum(one.share for one in samplers) for replica, samplers in live.items()}
        if not sum(counts.values()):
            for one in (one for samplers in live.values() for one in samplers):
                one.all_take_part()  # all begin anew from a checkpoint
            continue
        committed += [batch for replica in live if counts[replica] for batch in drawn[replica]]
        live |= newcomers
        for samplers in live.values():
            for one in samplers:
                one.advance(step, counts, sorted(live))
        states = [one.state_dict() for samplers in live.values() for one in samplers]
        assert all(state == states[0] for state in states), "all groups agree, whenever they started"
        step += 1
        if dice.random() < 0.05:  # all die, and come back from a checkpoint, knowing different numbers
            saved = states[0]
            live = {
                replica: group(
                    replica, started_with=max(number, replica + 1 + dice.randint(0, 2)), ranks=ranks
                )
                for replica in range(number)
                if replica == 0 or dice.random() < 0.8
            }
            for one in (one for samplers in live.values() for one in samplers):
                one.load_state_dict(saved)
                one.all_take_part()
    lost = [batch.number for batch in live[min(live)][0].lost]
    assert len(committed) == len(set(committed)), "no batch twice"
    dealt = sorted(committed + lost)
    assert dealt == list(range(len(dealt))), "every batch was committed once, or is listed"
