"""The same for groups that take an outer step every few steps."""

from __future__ import annotations

from tests.support.mutant import replaced

_DILOCO = "test_diloco.py::"
_ONE_TRY = ("training/diloco_session.py", "for _ in range(self._retries + 1):", "for _ in range(1):")

ROUNDS = [
    replaced(
        "training/diloco.py",
        "        self.restore()\n        self.optimizer.step()\n",
        "        self.optimizer.step()\n",
        f"{_DILOCO}test_a_kill_between_two_outer_steps_leaves_all_groups_equal_after_the_next",
        "assert {5: 3",
    ),
    replaced(
        "training/diloco_session.py",
        "while not (self._joined or self.finished):",
        "while False:",
        f"{_DILOCO}test_who_comes_back_heals_to_the_last_outer_step_and_computes_nothing_in_vain",
        "assert [0, 1, 2",
    ),
    replaced(
        *_ONE_TRY,
        f"{_DILOCO}test_nobody_asks_or_waits_for_another_group_between_two_outer_steps",
        "every step once",
    ),
    replaced(
        *_ONE_TRY,
        f"{_DILOCO}test_a_death_in_the_outer_average_costs_the_others_no_step_of_the_round",
        "the first attempt failed",
    ),
    replaced(
        "training/diloco_session.py",
        "self._group.members, steps=steps)",
        "self._group.members, steps=1)",
        f"{_DILOCO}test_no_sample_is_in_two_outer_steps_and_the_lost_ones_are_listed",
        "== {1}",
    ),
    replaced(
        "training/diloco_session.py",
        "        self._rates.skip(steps - self._taken)\n",
        "",
        f"{_DILOCO}test_every_group_has_the_rate_of_an_undisturbed_run_in_every_step",
        "assert 2 == 1",
    ),
    replaced(
        "training/diloco_session.py",
        "        self._rates.restore()\n",
        "",
        f"{_DILOCO}test_a_round_that_is_done_again_and_one_that_follows_a_checkpoint_are_as_if_nothing_had_been",
        "assert [(0,",
    ),
]
