"""The same for who watches over the groups: the watchdog, the budgets, the waits for those that never come."""

from __future__ import annotations

from tests.support.mutant import left_out, replaced

_WATCHDOG = "test_watchdog.py::"
_BUDGETS = "test_budgets.py::"
_HOSTS = "test_hosts.py::"
_HUNG = f"{_WATCHDOG}test_those_that_hang_are_ended_at_once_and_once_and_nobody_else"

WATCHED = [
    left_out("no_watchdog", f"{_HUNG}[1of2]", "not within"),
    left_out("blame_waiting", f"{_HUNG}[1of3]", "who waits is no culprit"),
    left_out("one_by_one", f"{_HUNG}[2of3]", "at once"),
    left_out("one_by_one", f"{_HUNG}[all]", "at once"),
    left_out(
        "one_by_one",
        f"{_WATCHDOG}test_where_all_wait_for_each_other_for_ever_all_are_ended_once",
        "at once",
    ),
    left_out(
        "deaf_to_pauses",
        f"{_WATCHDOG}test_who_pauses_is_left_alone_until_its_pause_is_over",
        "a pause is no hang",
    ),
    replaced(
        "training/agent_link.py",
        "*(self._pauses[-1] if self._pauses else (what, 0.0))",
        "what, 0.0",
        f"{_WATCHDOG}test_a_pause_inside_of_another_takes_nothing_from_it",
        "the outer pause was not over",
    ),
    left_out(
        "no_backoff",
        f"{_BUDGETS}test_delays_double_and_are_kept_over_a_death_of_the_controller_and_the_last_one_fails_the_run",
        "assert [0.0, 0.0, 0.0, 0.0] == [0, 0.4",
    ),
    left_out(
        "never_forget",
        f"{_BUDGETS}test_a_window_without_a_failure_gives_the_budget_back",
        "it is restarted once more",
    ),
    replaced(
        "controller/turn.py",
        "                spent_s=tuple(max(0, now_ns - at) / 1e9 for at in group.restarts_ns),\n",
        "",
        f"{_BUDGETS}test_what_a_killed_agent_has_spent_is_given_back_like_all_else",
        "what is left according to the status is also granted",
    ),
    left_out(
        "no_watchdog",
        f"{_BUDGETS}test_a_group_that_never_asks_is_named_and_waited_for_no_longer_than_its_limits[3-FAILED]",
        "not within",
    ),
    replaced(
        "controller/policy.py",
        "            self.actions.append(SetTimer(name=agent_timer(name), delay_s=delay_s, reason=reason))\n",
        "            del delay_s, reason\n",
        f"{_HOSTS}test_a_host_that_never_comes_is_named_and_waited_for_no_longer_than_its_limits[3-FAILED]",
        "not within",
    ),
    left_out(
        "no_drain",
        f"{_HOSTS}test_a_host_that_is_about_to_be_taken_away_loses_nothing_and_stops_nobody",
        "it does not wait for the end of the grace time",
    ),
    left_out(
        "forget_service",
        f"{_HOSTS}test_hosts_that_enrolled_train_over_tls_and_outlive_their_controller",
        "has not answered",
    ),
    left_out(
        "stay_in_quorum",
        f"{_HOSTS}test_a_host_that_saves_before_it_goes_holds_nobody_up",
        "< LONGEST_GAP_S",
    ),
    replaced(
        "controller/__main__.py",
        "signal.signal(number, signal.SIG_IGN)",
        "pass",
        "test_controller_process.py::test_a_warning_that_reaches_every_process_of_a_job_ends_no_controller",
        "run.process.pid",
    ),
    replaced(
        "keeper.py",
        "_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}",
        "_TOLD = {signal.SIGTERM, signal.SIGINT}",
        f"{_HOSTS}test_a_host_that_saves_before_it_goes_holds_nobody_up",
        "== 143",
    ),
    replaced(
        "training/session.py",
        "if kind is SystemExit and self.drain_requested:",
        "if False:",
        "test_checkpoint_runs.py::test_groups_whose_host_is_taken_away_save_the_step_that_they_have",
        "it was saved before they went",
    ),
    replaced(
        "controller/recovery.py",
        'exit_=event["exit"], oom=event["oom"])',
        'exit_=event["exit"], oom=False)',
        "test_evidence.py::test_a_rank_that_the_kernel_ends_for_its_memory_is_the_cause_and_its_group_is_not",
        "out of memory",
    ),
    replaced(
        "controller/memory.py",
        "self.losses.take(report)",
        "(report, [])",
        "test_training_runs.py::test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal",
        "its samples are listed",
    ),
]
