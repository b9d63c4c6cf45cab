"""Of hosts that are provisioned: which step left out turns which test red."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_UNIT = "tests/unit/"
_POLICY = f"{_UNIT}test_host_policy.py::"
_SPARES = f"{_UNIT}test_spares.py::"
_HISTORIES = (
    f"{_UNIT}test_host_histories.py::"
    "test_whatever_happens_there_is_one_attempt_at_a_time_and_one_cluster_a_slot"
)
_WHOLE = (
    f"{_UNIT}test_host_simulation.py::"
    "test_a_run_whose_hosts_are_lost_again_and_again_keeps_its_invariants_and_ends"
)
_KILLED = "test_controller_hosts.py::test_a_controller_that_is_killed_after_any_word_on_hosts_goes_on_as_if_it_had_not"

HOSTS = [
    # A setup that was interrupted with its host is none that failed, also where nobody trains yet.
    replaced(
        "controller/replacing.py",
        "not (began or killed or host.leaving)",
        "not began",
        "test_rehearsal.py::test_a_host_that_is_taken_away_in_its_setup_is_had_again_and_no_setup_has_failed"
        "[told-nobody trains]",
        "FAILED_SETUP",
    ),
    # Want of capacity: what is there is not kept for ever for what cannot be had.
    replaced(
        "controller/policy.py",
        "self._patience_over()",
        "pass",
        "test_controller_hosts.py::test_a_host_that_waits_for_one_that_cannot_be_had_is_let_go_at_the_limit",
        "the limit is over",
    ),
    # Agents of hosts that are here as well are not the head's: a run without its head is lost, and told so.
    replaced(
        "launch/folder.py",
        "return module in arguments and Path(arguments[-1]).parent.name == self.run_id",
        "return module in arguments",
        "test_rehearsal.py::test_a_run_whose_head_was_lost_is_taken_up_again_to_end_its_hosts",
        "are not its head",
    ),
    # Several hosts of a run on one kernel.
    left_out(
        "sweep_all_hosts",
        "test_rehearsal.py::test_a_lost_host_comes_back_alone_and_down_waits_until_all_are_gone",
        "the other group was not touched",
    ),
    # I6: one outstanding attempt a host, one cluster a slot.
    Mutant(
        _HISTORIES,
        "I6",
        module="controller/replacing.py",
        old="        if event.attempt != host.attempt:\n",
        new="        if False:\n",
    ),
    Mutant(
        _HISTORIES,
        "an agent of an older attempt is fenced",
        module="controller/hosts.py",
        old="    if attempt != host.attempt and not (forgotten and attempt > host.attempt):\n",
        new="    if False:\n",
    ),
    Mutant(
        _HISTORIES,
        "a launcher that waits is told",
        module="controller/policy.py",
        old="        after = replace(after, wanted=after.wanted + 1)\n",
        new="        pass\n",
    ),
    Mutant(
        f"{_WHOLE}[0]",
        "I6",
        module="controller/replacing.py",
        old="        if event.attempt != host.attempt:\n",
        new="        if False:\n",
    ),
    Mutant(
        f"{_WHOLE}[0]",
        "may still bill",
        module="controller/hosts.py",
        old=" or state.reaping is Reaping.NOW:\n",
        new=":\n",
    ),
    # A spare host.
    replaced(
        "controller/spares.py",
        "        self.prepared.append(spare.name)\n",
        "",
        "test_spares.py::"
        "test_the_groups_of_a_host_that_is_switched_off_go_on_on_the_spare_and_the_next_one_is_had",
        "the group commits on the spare",
    ),
    Mutant(
        f"{_SPARES}test_a_silent_host_is_left_for_a_spare_as_soon_as_it_is_doubted",
        "assert",
        module="controller/replacing.py",
        old="        if host.replicas and self._is_needed(host) and self._ready_spare() is not None:\n",
        new="        if False:\n",
    ),
    Mutant(
        f"{_SPARES}test_without_a_spare_a_silent_host_is_doubted_and_waited_for",
        "whoever provides it is asked now",
        module="controller/policy.py",
        old="                self._line_lost(event.host)\n",
        new="",
    ),
    Mutant(
        f"{_SPARES}test_a_spare_that_is_ready_first_takes_the_groups_of_a_host_that_is_awaited",
        "assert",
        module="controller/verdict.py",
        old="            self._spare_came(name)\n",
        new="            pass\n",
    ),
    Mutant(
        f"{_SPARES}test_the_end_waits_for_the_older_attempt_that_is_taken_down_beside",
        "its first attempt may bill",
        module="controller/hosts.py",
        old="not (host.gone and host.replaces is None)",
        new="not host.gone",
    ),
    Mutant(
        f"{_SPARES}test_where_groups_are_is_taken_from_their_agents_when_the_journal_is_lost",
        "assert",
        module="controller/policy.py",
        old="        self._adopt_place(event.host, frozenset(snapshot.replica for snapshot in event.groups))\n",
        new="",
    ),
    Mutant(
        f"{_UNIT}test_timers.py::test_time_in_which_the_process_was_stopped_is_nobodys_silence",
        "it could hear for no longer than that",
        module="controller/timers.py",
        old="slice_s = min(_SLICE_S, left_s)",
        new="slice_s = left_s",
    ),
    # Who waits for the hosts of others pays nothing.
    replaced(
        "training/rounds.py",
        "(attempt >= _QUORUM_TRIES and not attended)",
        "attempt >= _QUORUM_TRIES",
        "test_too_few_hosts.py::test_a_group_that_waits_for_the_host_of_another_one_spends_nothing_of_its_budget",
        "nobody's budget is spent",
    ),
    # A lost host comes back alone, and costs its groups nothing of their budgets.
    Mutant(
        f"{_POLICY}test_a_silent_host_is_replaced_alone_at_once_and_costs_its_group_no_restart",
        "assert",
        module="controller/replacing.py",
        old="beyond = 2 * self.limits.max_restarts if jump and group.started else 0",
        new="beyond = 0",
    ),
    Mutant(
        f"{_POLICY}test_a_host_that_leaves_is_not_fenced_before_it_has_left",
        "assert",
        module="controller/policy.py",
        old="                if (host := self.state.host(event.host)).leaving:\n",
        new="                if False:\n",
    ),
    Mutant(
        f"{_POLICY}test_no_capacity_is_waited_for_with_a_pause_that_doubles_and_without_an_end",
        "assert",
        module="controller/replacing.py",
        old="            self._lose(host, why, gone=host.gone, fault=False, pause=True)\n",
        new="            self._lose(host, why, gone=host.gone, fault=True, pause=True)\n",
    ),
    Mutant(
        f"{_UNIT}test_host_readiness.py::test_who_does_not_answer_may_be_dead_and_holds_up_nobody",
        "assert",
        module="controller/hosts.py",
        old="        if self.mine is None or self.theirs is None:\n            return None\n",
        new="",
    ),
    Mutant(
        f"{_UNIT}test_host_memory.py::"
        "test_a_lost_host_is_a_failure_of_each_of_its_groups_that_counts_from_when_it_fell_silent",
        "assert",
        module="controller/recovery.py",
        old='self._silent.get(event["host"], now)',
        new="now",
    ),
    # Money: what may bill is waited for, and counted.
    Mutant(
        f"{_POLICY}test_a_run_whose_failed_launch_left_something_behind_ends_only_when_that_is_down[refused]",
        "assert",
        module="controller/replacing.py",
        old="gone=not event.left",
        new="gone=True",
    ),
    Mutant(
        f"{_UNIT}test_host_ends.py::test_the_end_waits_until_every_host_is_down_and_the_head_goes_last",
        "assert",
        module="controller/ending.py",
        old="        return list(standing(self.state)) if self.state.launched else []\n",
        new="        return []\n",
    ),
    Mutant(
        f"{_UNIT}test_money.py::"
        "test_an_attempt_without_a_commit_is_wasted_as_a_whole_and_so_is_a_replacement_until_its_first_one",
        "assert",
        module="controller/money.py",
        old="seconds if self.committed_s is None else",
        new="0.0 if self.committed_s is None else",
    ),
    Mutant(
        f"{_UNIT}test_money.py::"
        "test_the_time_in_which_no_controller_ran_is_paid_for_also_over_a_restart_of_the_machine",
        "assert",
        module="controller/money.py",
        old="        if passed_s < -_JITTER_S:",
        new="        if False:",
    ),
    # Killed in any phase.
    replaced("controller/controller.py", "        self._replay()\n", "", _KILLED, "it goes on with"),
    replaced(
        "controller/agents.py",
        "        if (fence := self.fenced(host, attempt)) is not None:\n",
        "        if (fence := None) is not None:\n",
        _KILLED,
        "assert",
    ),
    replaced(
        "controller/logs.py",
        "            if kept is None:\n                raise\n            return kept\n",
        "            raise\n",
        "test_controller_hosts.py::test_output_of_the_others_is_followed_while_a_host_is_away",
        "agent_unreachable",
    ),
]
