"""The same for models that are sharded over their group."""

from __future__ import annotations

from tests.support.mutant import Mutant, replaced

_SHARDED = "test_sharded.py::"
_UNIT = "tests/unit/test_sharding.py::"

SHARDED = [
    # Averaged over the ranks of the group once more, though they hold different shards.
    replaced(
        "training/collectives.py",
        "for flat in self._flats if not flat.sharded for one",
        "for flat in self._flats for one",
        f"{_SHARDED}test_the_gradient_is_the_mean_over_the_samples_of_all_ranks_at_every_world_size",
        "-signal.SIGKILL, self.zygote.log()",
    ),
    # A rank that fails goes on alone with what it kept, while the other has begun the step anew.
    replaced(
        "training/agreement.py",
        "return bool(again)",
        "return word",
        f"{_SHARDED}test_each_rank_heals_from_its_like_and_is_equal_to_it_after_each_step",
        "not within 90 s: 'step 7",
    ),
    replaced(
        "training/state.py",
        "        manager.load_state_dict(parts[MANAGER])\n        return True",
        "        return False",
        f"{_SHARDED}test_all_groups_killed_at_once_go_on_from_the_shards_that_were_saved",
        "At index 0 diff: 0 != 10",
    ),
    replaced(
        "training/session.py",
        '        self.register_state("optimizer", optimizer.load_state_dict, optimizer.state_dict)\n',
        "",
        f"{_SHARDED}test_it_ends_as_one_process_does_that_was_never_disturbed",
        ", state 0",
    ),
    Mutant(
        f"{_UNIT}test_a_state_travels_as_shards_and_arrives_on_the_mesh_of_whom_it_heals",
        "nobody has resharded them under the step",
        module="training/sharding.py",
        old="state = self._noted if key == MODEL else save()",
        new="state = save()",
    ),
    Mutant(
        f"{_UNIT}test_a_standby_waits_for_its_group_until_it_is_needed",
        "belongs to no generation",
        module="training/membership.py",
        old="    wait_for_promotion()\n",
        new="",
    ),
]
