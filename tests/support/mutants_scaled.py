"""Of runs that are scaled, and of hosts that are all taken away: which step left out turns which test red."""

from __future__ import annotations

from tests.support.mutant import Mutant, replaced

_UNIT = "tests/unit/"
_SCALING = f"{_UNIT}test_scaling.py::"
_SAVES = f"{_UNIT}test_preemption.py::"
_RUNS = "test_scale.py::"
_LAST = "test_last_saves.py::"
_HISTORIES = (
    f"{_UNIT}test_scaling_histories.py::test_a_run_that_is_scaled_again_and_again_gets_to_what_was_asked_last"
)
_SAMPLES = (
    f"{_UNIT}test_sampler_scaled.py::test_no_history_of_scaling_commits_a_sample_twice_or_passes_one_over"
)

SCALED = [
    replaced(
        "controller/controller.py",
        "        self._agents.place(hosts)\n",
        "",
        f"{_RUNS}test_groups_are_added_and_leave_in_order_and_a_new_controller_knows_how_many",
        "not within 60 s",
    ),
    replaced(
        "provision/provider.py",
        '    return None if first is None else {**first, "cluster": host, "groups": []}\n',
        "    return None\n",
        f"{_RUNS}test_hosts_are_asked_for_and_taken_down_as_the_groups_come_and_go",
        "not within 40 s",
    ),
    Mutant(
        f"{_SCALING}test_no_good_host_is_let_go_while_another_is_awaited",
        "trains on in place",
        module="controller/scaling.py",
        old="not (awaits and group.started)",
        new="True",
    ),
    Mutant(
        f"{_SCALING}test_a_host_that_is_lost_while_its_group_leaves_does_not_bring_it_back",
        "assert",
        module="controller/replacing.py",
        old="if group.phase.final or group.dropped:",
        new="if group.phase.final:",
    ),
    Mutant(
        f"{_SCALING}test_a_host_that_was_taken_down_is_had_again_as_its_next_attempt",
        "assert",
        module="controller/scaling.py",
        old="            self._vacate(host, self._why, jump=False)\n",
        new="",
    ),
    Mutant(
        f"{_HISTORIES}[1]",
        "and no other",
        module="controller/scaling.py",
        old="if group.dropped and group.at_rest:",
        new="if False:",
    ),
    # I9: who starts later knows another number of groups.
    Mutant(
        f"{_SAMPLES}[1]",
        "all groups agree",
        module="training/sampler.py",
        old="            position = replace(position, members=tuple(range(max(members, default=0) + 1)))\n",
        new="            pass\n",
    ),
    replaced(
        "controller/preemption.py",
        "replica=min(mine)",
        "replica=None",
        f"{_LAST}test_the_last_host_that_is_taken_away_saves_what_nobody_else_has",
        "not within 90 s",
    ),
    replaced(
        "controller/preemption.py",
        "replica=min(mine)",
        "replica=None",
        f"{_LAST}test_all_groups_of_the_only_host_leave_and_their_state_is_saved",
        "nothing that was committed is lost",
    ),
    replaced(
        "controller/preemption.py",
        "        if others:\n",
        "        if False:\n",
        f"{_LAST}test_a_host_that_leaves_others_behind_saves_nothing",
        "assert",
    ),
    Mutant(
        f"{_SAVES}test_a_host_that_is_cut_off_before_its_groups_have_left_is_a_loss",
        "assert",
        module="controller/replacing.py",
        old=" and (g.live or not host.leaving)",
        new=" and not host.leaving",
    ),
]
