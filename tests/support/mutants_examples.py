"""The same for the examples of the actor API."""

from __future__ import annotations

from tests.support.mutant import replaced

EXAMPLES = [
    replaced(
        "actors/owned.py",
        "        self._make_again(ranks, end)\n",
        "        del end\n",
        "test_actor_examples.py::test_the_work_goes_on_after_a_rank_was_lost_and_comes_out_right",
        "there is no such actor in this process",
    ),
    replaced(
        "actors/far_host.py",
        "            try:\n                proc.on_end(proc)\n            finally:\n                proc.ended.set()\n",
        "            proc.ended.set()\n",
        "test_actor_examples.py::test_two_hosts_play_a_game_and_one_loses_a_player",
        "one event a failure",
    ),
]
