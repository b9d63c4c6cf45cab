"""Of groups that have several hosts: which step left out turns which test red."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_UNIT = "tests/unit/"
_POLICY = f"{_UNIT}test_wide_policy.py::"
_WHOLE = (
    f"{_UNIT}test_wide_simulation.py::"
    "test_wide_groups_whose_ranks_and_hosts_are_lost_again_and_again_keep_their_invariants_and_end[0]"
)
_RUNS = "test_wide.py::"
_MODULE = "controller/wide.py"


def _policy(test: str, words: str, old: str, new: str, *, module: str = _MODULE) -> Mutant:
    return Mutant(_POLICY + test, words, module=module, old=old, new=new)


_TOLD = "                    self._end_part(group, part.host, group.generation, why)\n"
_EARLY = "return all(part.phase is PartPhase.IDLE for part in self.parts)"
_CHARGED = "        if span.free:\n"

WIDE = [
    # A death ends the generation on all hosts, and nothing begins before nothing is left (I1).
    replaced(
        _MODULE,
        _TOLD,
        "                    pass\n",
        f"{_RUNS}test_a_killed_rank_restarts_its_group_on_both_hosts_and_the_others_train_on",
        "not within",
    ),
    left_out(
        "restart_alone",
        f"{_RUNS}test_a_killed_rank_restarts_its_group_on_both_hosts_and_the_others_train_on",
        "assert",
    ),
    left_out(
        "deaf_to_other_hosts",
        f"{_RUNS}test_a_killed_rank_restarts_its_group_on_both_hosts_and_the_others_train_on",
        "not within",
    ),
    _policy(
        "test_a_death_ends_the_generation_on_all_hosts_and_the_next_begins_when_nothing_is_left",
        "I1",
        _EARLY,
        "return any(part.phase is PartPhase.IDLE for part in self.parts)",
        module="controller/groups.py",
    ),
    Mutant(
        _WHOLE,
        "I1",
        module="controller/groups.py",
        old=_EARLY,
        new="return any(part.phase is PartPhase.IDLE for part in self.parts)",
    ),
    _policy(
        "test_the_silence_of_a_host_ends_its_group_elsewhere_long_before_it_counts_as_lost",
        "assert",
        '                self._fall(group, f"host {name} was silent for {self.limits.part_silent_s:g} s")\n',
        "                pass\n",
    ),
    _policy(
        "test_a_host_on_which_a_generation_does_not_end_is_replaced",
        "ValueError",
        "                self._lose(host, why, gone=False, fault=False)\n",
        "                pass\n",
    ),
    _policy(
        "test_late_words_of_an_older_generation_change_nothing",
        "assert",
        "        if event.generation != group.generation and not stopped_nothing:\n",
        "        if False:\n",
    ),
    # The budget is the group's, and kept here (I3).
    replaced(
        _MODULE,
        "        if len(spent) >= self.limits.max_restarts:\n",
        "        if False:\n",
        f"{_RUNS}test_a_crash_loop_on_one_host_spends_one_budget_and_the_run_goes_on_without_the_group",
        "not within",
    ),
    Mutant(
        f"{_UNIT}test_wide_simulation.py::test_a_crash_loop_on_two_hosts_spends_one_budget",
        "assert",
        module=_MODULE,
        old="        if len(spent) >= self.limits.max_restarts:\n",
        new="        if False:\n",
    ),
    _policy(
        "test_a_command_that_never_runs_is_given_up_after_three_tries_whatever_is_left_of_the_budget",
        "assert",
        "        if span.never_ran is not None and vain >= _MOST_TRIES:\n",
        "        if False:\n",
    ),
    _policy(
        "test_only_tries_in_a_row_that_no_lost_host_has_ended_count_as_vain",
        "assert",
        "        vain = 0 if span.free or span.never_ran is None else span.vain + 1\n",
        "        vain = 0 if span.never_ran is None else span.vain + 1\n",
    ),
    _policy(
        "test_restarts_without_progress_wait_longer_each_time",
        "assert",
        "        self._with_span(group, fruitless=fruitless + 1, resting=delay_s > 0)\n",
        "        self._with_span(group, fruitless=fruitless + 1)\n",
    ),
    # A lost host costs its group no restart, and takes the rest of it along.
    replaced(
        _MODULE,
        '            self._fall(group, f"host {host.name} was lost: {why}", free=True)\n',
        "            pass\n",
        f"{_RUNS}test_a_lost_host_of_a_group_is_replaced_alone_and_its_group_starts_again_on_both",
        "not within",
    ),
    replaced(
        _MODULE,
        '            self._fall(group, f"host {host.name} was lost: {why}", free=True)\n',
        "            pass\n",
        f"{_RUNS}test_a_controller_that_is_killed_in_the_middle_of_it_changes_nothing[host]",
        "not within",
    ),
    _policy(
        "test_a_death_that_a_lost_host_has_caused_elsewhere_costs_no_restart_either",
        "assert",
        _CHARGED,
        "        if False:\n",
    ),
    replaced(
        _MODULE,
        '                self._fall(group, f"host {name} is leaving: {reason}", free=True, gently=True)\n',
        "                pass\n",
        f"{_RUNS}test_a_host_that_is_told_to_leave_takes_its_group_along_in_order",
        "assert",
    ),
    _policy(
        "test_an_order_that_did_not_arrive_is_given_again_and_an_agent_that_restarted_ends_its_group",
        "assert",
        '            self._order(group, host, "the first order did not arrive")\n',
        "            pass\n",
    ),
    # Done is done on all hosts.
    replaced(
        _MODULE,
        "        done = all(one.phase is PartPhase.DONE for one in self._span(group).parts)\n",
        "        done = any(one.phase is PartPhase.DONE for one in self._span(group).parts)\n",
        f"{_RUNS}test_a_group_is_done_when_its_ranks_on_all_hosts_are",
        "done means done on all hosts",
    ),
    # The ranks meet in the store of the first host.
    replaced(
        _MODULE,
        "                store=None if host == span.parts[0].host else span.store,\n",
        "                store=None,\n",
        f"{_RUNS}test_a_torchrun_script_meets_its_ranks_on_the_other_host",
        "assert",
    ),
    replaced(
        _MODULE,
        "                store=None if host == span.parts[0].host else span.store,\n",
        "                store=None,\n",
        f"{_RUNS}test_a_session_of_two_hosts_heals_and_all_end_bit_equal",
        "not within",
    ),
]
