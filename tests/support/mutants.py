"""Which step of recovery is left out to turn which test red."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced
from tests.support.mutants_actors import ACTORS
from tests.support.mutants_archived import ARCHIVED
from tests.support.mutants_examples import EXAMPLES
from tests.support.mutants_head import AWAY
from tests.support.mutants_healed import HEALED
from tests.support.mutants_hosts import HOSTS
from tests.support.mutants_kept import KEPT
from tests.support.mutants_provided import PROVIDED
from tests.support.mutants_rounds import ROUNDS
from tests.support.mutants_saved import DEALT, FORKED, SAVED
from tests.support.mutants_scaled import SCALED
from tests.support.mutants_sharded import SHARDED
from tests.support.mutants_told import TOLD
from tests.support.mutants_tunnel import TUNNEL
from tests.support.mutants_unfit import UNFIT
from tests.support.mutants_watched import WATCHED
from tests.support.mutants_wide import WIDE

RECOVERY = "test_recovery.py::"
ORPHANS = "test_orphans.py::"
STANDBY = "test_standby.py::"
CONTROLLER = "test_controller_process.py::"
LIFECYCLE = "test_lifecycle.py::"
SESSION = "test_session.py::"
RUNS = "test_training_runs.py::"
SILENCE = "test_lighthouse_silence.py::"
STORES = "test_lighthouse_stores.py::"
PROCESSES = "test_attacks_processes.py::"
FOLDERS = "test_attacks_folders.py::"
TERMINAL = "test_attacks_terminal.py::"
KILLED = f"{RECOVERY}test_a_killed_rank_is_replaced_and_the_others_keep_their_processes"

_RUNNING = [
    # A rank dies, hangs or leaves early.
    left_out("drop_restart", KILLED, "test_a_killed_rank", always=True),
    left_out("skip_evict", KILLED, "test_a_killed_rank"),
    left_out(
        "skip_evict",
        f"{RECOVERY}test_survivors_commit_while_the_victim_is_away",
        "not within 15 s",
    ),
    left_out(
        "drop_restart", f"{RECOVERY}test_every_rank_of_the_group_is_replaced_when_one_dies", "not within"
    ),
    left_out("no_watchdog", f"{RECOVERY}test_a_hung_rank_is_found_and_replaced", "not within"),
    left_out("blame_waiting", f"{RECOVERY}test_a_hung_rank_is_found_and_replaced", "who waits is no culprit"),
    left_out(
        "no_watchdog",
        f"{RECOVERY}test_a_rank_that_hangs_while_it_says_that_it_waits_is_not_excused_for_ever",
        "not within",
    ),
    left_out(
        "blame_own_pause",
        f"{RECOVERY}test_a_supervisor_that_was_paused_blames_nobody_when_it_comes_back[agent]",
        "nobody was restarted",
    ),
    left_out(
        "no_budget",
        f"{RECOVERY}test_a_crash_loop_stops_at_its_budget_and_names_the_cause",
        "not within",
    ),
    left_out("no_budget", f"{RECOVERY}test_the_run_goes_on_degraded_while_min_replicas_hold", "not within"),
    left_out(
        "deaf_at_rest", f"{RECOVERY}test_down_does_not_wait_for_a_restart_that_is_still_to_come", "< 25"
    ),
    replaced(
        "controller/policy.py",
        "seen.generation < group.generation:",
        "seen.generation <= group.generation:",
        f"{RECOVERY}test_a_new_controller_does_not_stop_a_group_that_waits_for_its_restart",
        "nothing is ordered",
    ),
    left_out(
        "accept_early_exit",
        "test_exits.py::test_exit_0_before_the_end_is_a_failure_of_that_replica[1:0:exit=0]",
        "not within",
    ),
    left_out(
        "drop_restart", f"{LIFECYCLE}test_rehearsed_faults_happen_once_and_are_recovered", "TimeoutExpired"
    ),
    # What a rank, a setup or a run leaves behind.
    left_out(
        "no_tree_kill",
        "test_ports.py::test_grandchildren_go_with_their_rank_and_free_their_port",
        "assert",
    ),
    left_out(
        "kill_first",
        f"{LIFECYCLE}test_fifty_restarts_end_with_term_before_kill_and_leave_no_zombie",
        "TERM comes first",
    ),
    replaced(
        "sdk/run.py",
        "left = local.reap(self._folder, grace_s=grace_s)",
        "left = []",
        f"{PROCESSES}test_down_ends_a_run_whose_own_processes_are_stopped[stopped1]",
        "assert not [",
    ),
    replaced(
        "sdk/run.py",
        """        elif self._folder.phase() is Phase.LIVE and self._ask_down(grace_s, reason):
            self._await_end(grace_s + _DOWN_MARGIN_S)
        left = local.reap(self._folder, grace_s=grace_s)
""",
        "        left = []\n",
        f"{LIFECYCLE}test_down_ends_everything_and_can_be_said_twice",
        "twice.<locals>.<lambda>",
    ),
    replaced(
        "sdk/run.py",
        """        elif self._folder.phase() is Phase.LIVE and self._ask_down(grace_s, reason):
            self._await_end(grace_s + _DOWN_MARGIN_S)
        left = local.reap(self._folder, grace_s=grace_s)
""",
        "        left = []\n",
        f"{LIFECYCLE}test_down_during_setup_cancels_the_up_that_waits",
        "TimeoutExpired",
    ),
    replaced(
        "controller/plans.py",
        "self._job.setup_timeout_s,",
        "600.0,",
        "test_exits.py::test_a_setup_without_an_end_is_ended_at_its_limit",
        "TimeoutExpired",
    ),
    # Controller and lighthouse die.
    left_out(
        "forget_service", f"{LIFECYCLE}test_the_head_agent_brings_its_services_back[lighthouse]", "not within"
    ),
    left_out(
        "forget_service",
        f"{LIFECYCLE}test_the_head_agent_brings_its_services_back[controller_pid]",
        "has not answered",
    ),
    left_out(
        "forget_unnamed",
        f"{PROCESSES}test_a_service_whose_pid_cannot_be_written_down_runs_once_all_the_same",
        "more items",
    ),
    left_out(
        "forget_service",
        f"{PROCESSES}test_a_lighthouse_that_is_killed_again_and_again_while_it_is_asked_ends_no_rank",
        "written_pid",
    ),
    left_out(
        "wait_for_stopped",
        "test_recovery.py::test_a_lighthouse_that_stays_stopped_is_replaced_by_its_spare",
        "not within",
    ),
    left_out(
        "door_gives_up",
        "test_door.py::test_a_rank_without_retries_outlives_the_lighthouse_that_it_asks",
        "nobody was lost",
        always=True,
    ),
    left_out(
        "door_gives_up",
        "test_door.py::test_managers_without_retries_outlive_the_lighthouse_that_they_ask",
        ">           commit_together(folder, beyond=commits",
    ),
    replaced(
        "controller/controller.py",
        "        self._replay()\n",
        "",
        f"{CONTROLLER}test_a_killed_controller_comes_back_and_adopts_the_live_groups",
        "assert",
        always=True,
    ),
    replaced(
        "controller/controller.py",
        "        self._replay()\n",
        "",
        f"{CONTROLLER}test_a_run_that_ended_while_the_controller_was_away_is_not_run_again",
        "'PENDING' == 'SUCCEEDED'",
    ),
    replaced(
        "controller/controller.py",
        "        self._append(row)\n\n    def _record",
        "        if seq % 7:\n            self._append(row)\n\n    def _record",
        f"{CONTROLLER}test_no_acked_event_is_lost_wherever_the_controller_is_killed",
        "without gaps, once each",
    ),
    replaced(
        "controller/orders.py",
        "fired=self._fired()",
        "fired=frozenset()",
        f"{CONTROLLER}test_a_second_injection_of_the_same_fault_never_happens",
        "At index 1 diff",
    ),
    replaced(
        "controller/verdict.py",
        "if tally.able < self.limits.min_replicas:\n            self._fail",
        "if not tally.able:\n            self._fail",
        f"{CONTROLLER}test_a_spent_budget_fails_the_run_with_the_root_cause",
        "what the agent waits for",
    ),
    replaced(
        "controller/agents.py",
        "except ProtocolError as error:",
        "except ZeroDivisionError as error:",
        "test_controller_peers.py::test_a_peer_that_breaks_the_protocol_is_dropped_and_the_run_goes_on",
        "ConnectError",
    ),
    replaced(
        "controller/agents.py",
        "if known is not None and known.incarnation != incarnation:",
        "if False:",
        "test_controller_peers.py::test_a_second_agent_of_one_host_is_dropped_while_the_first_lives",
        "the controller hangs up",
    ),
    replaced(
        "controller/controller.py",
        "if self._state.phase.ended or self._state.phase is model.RunPhase.STOPPING:",
        "if False:",
        f"{CONTROLLER}test_down_stops_the_groups_and_is_idempotent",
        "3 == 1",
    ),
    # The supervisor dies.
    left_out(
        "keep_orphans",
        f"{ORPHANS}test_a_killed_agent_is_replaced_and_no_rank_lives_twice",
        "not within",
        always=True,
    ),
    replaced(
        "keeper.py",
        "_MOST_SHORT_LIVES = 10",
        "_MOST_SHORT_LIVES = 1",
        f"{ORPHANS}test_a_killed_agent_is_replaced_and_no_rank_lives_twice",
        "not within",
    ),
    replaced(
        "keeper.py",
        "            return _live(run)\n",
        "            import ctypes\n            ctypes.CDLL(None).prctl(1, 9)\n            return _live(run)\n",
        f"{ORPHANS}test_a_run_outlives_the_keeper_of_its_agent",
        "assert 'LOST' == 'RUNNING'",
    ),
    left_out(
        "no_death_signal",
        f"{ORPHANS}test_without_a_keeper_the_run_is_lost_but_its_ranks_still_end",
        "not within 15 s",
    ),
    replaced(
        "keeper.py",
        "_MOST_SHORT_LIVES = 10",
        "_MOST_SHORT_LIVES = 3",
        f"{ORPHANS}test_an_agent_that_is_killed_again_and_again_is_given_up",
        "assert 3 == 10",
    ),
    replaced(
        "keeper.py",
        "            told = True\n",
        "",
        f"{ORPHANS}test_a_keeper_that_is_told_to_end_between_two_lives_begins_no_other",
        "the keeper ends",
    ),
    replaced(
        "sdk/run.py",
        """        elif self._folder.phase() is Phase.LIVE and self._ask_down(grace_s, reason):
            self._await_end(grace_s + _DOWN_MARGIN_S)
        left = local.reap(self._folder, grace_s=grace_s)
""",
        "        left = []\n",
        f"{ORPHANS}test_down_ends_a_run_between_two_lives_of_its_agent",
        "its_agent.<locals>.<lambda>",
    ),
    left_out(
        "few_files",
        f"{PROCESSES}test_a_low_soft_limit_of_open_files_stops_no_group_and_is_handed_on_to_ranks",
        "more items",
    ),
    # Standbys.
    left_out(
        "promote_nobody",
        f"{STANDBY}test_a_standby_that_ran_ahead_becomes_the_rank_and_was_nobody_before",
        "not within",
        always=True,
    ),
    left_out(
        "lose_standby",
        f"{STANDBY}test_a_standby_that_is_killed_is_replaced_by_one_that_serves",
        ">       second = standby_of",
    ),
    left_out(
        "promote_nobody",
        f"{STANDBY}test_two_deaths_in_a_row_find_it_ready_on_its_way_or_not_there",
        "not within 30 s: <function kill_and_see_it_back",
    ),
    left_out(
        "run_ahead_again",
        f"{STANDBY}test_a_script_that_crashes_ahead_stands_by_with_its_imports_and_is_not_run_ahead_again",
        "assert 2 == 1",
    ),
    left_out(
        "run_ahead_again",
        f"{STANDBY}test_a_script_that_takes_its_process_down_ahead_is_not_run_ahead_again",
        "assert",
    ),
    left_out(
        "promote_ready_only",
        f"{STANDBY}test_a_standby_is_promoted_on_its_way",
        "+  where False = <built-in method startswith",
    ),
    left_out("first_rank_stands_by", f"{STANDBY}test_every_rank_of_a_group_has_its_own", "not within 30 s"),
    # The training session.
    replaced(
        "training/session.py",
        '        self.register_state("optimizer", optimizer.load_state_dict, optimizer.state_dict)\n',
        "",
        f"{SESSION}test_a_replica_that_dies_in_mid_allreduce_costs_the_others_no_step_and_comes_back_equal",
        ">       assert {step: len(found)",
    ),
    replaced(
        "training/session.py",
        "if kind is None and self._target_step is not None and self.finished:",
        "if False:",
        f"{SESSION}test_a_group_that_is_late_heals_from_donors_that_are_done",
        "still runs after",
    ),
    replaced(
        "training/beginning.py",
        "if int(extremes[0]) != -int(extremes[1]):",
        "if False:",
        f"{SESSION}test_replicas_that_start_from_different_parameters_are_refused",
        "[0, 0] == [1, 1]",
    ),
    replaced(
        "training/drain.py",
        "FrameType | None) -> None:  # noqa: ARG002\n        self._asked.set()\n",
        "FrameType | None) -> None:\n        del frame\n",
        f"{SESSION}test_a_drained_replica_finishes_its_step_and_exits_0_while_the_others_go_on",
        "still runs after 15 s",
    ),
    replaced(
        "training/drain.py",
        "if self._interruptible:",
        "if False:",
        f"{SESSION}test_a_replica_that_waits_for_its_quorum_leaves_at_once_when_drained",
        "still runs after 10 s",
    ),
    replaced(
        "training/session.py",
        "if self._state.restore(manager):",
        "if False:",
        f"{SESSION}test_all_groups_go_on_from_the_newest_checkpoint",
        "At index 0 diff: 1 != 9",
    ),
    # Runs as people start them.
    left_out(
        "drop_restart", "test_cli_run.py::test_a_rehearsed_kill_is_recovered_and_reported", "TimeoutExpired"
    ),
    left_out(
        "drop_restart",
        "test_environment.py::test_values_arrive_unchanged_on_every_replica_and_after_a_restart",
        "not within 30 s",
    ),
    left_out(
        "drop_restart",
        "test_secrets.py::test_values_are_byte_equal_on_every_replica_and_in_every_generation[0]",
        "not within 40 s",
    ),
    left_out(
        "promote_nobody",
        "test_secrets.py::test_values_are_byte_equal_on_every_replica_and_in_every_generation[1]",
        "not within 40 s",
    ),
    replaced(
        "sdk/run.py",
        "left = local.reap(self._folder, grace_s=grace_s)",
        "left = []",
        "test_cli_run.py::test_a_run_whose_agent_and_its_keeper_are_killed_is_lost_and_down_reaps_it",
        "carrying(run.run_id) == []",
    ),
    replaced(
        "sdk/run.py",
        """                time.sleep(patience.delay_s(error))
        yield from cursor.rest(self._folder)
""",
        "                raise error\n",
        "test_cli_run.py::test_attached_streams_survive_the_death_of_the_controller",
        "no line lost or shown twice",
    ),
    left_out(
        "promote_nobody",
        f"{RUNS}test_the_same_holds_where_the_standby_has_run_ahead_up_to_its_session",
        "first_commit {'replica': 1",
    ),
    left_out(
        "drop_restart",
        f"{RUNS}test_the_same_holds_under_torchfts_own_lighthouse",
        "first_commit {'replica': 1",
    ),
    left_out("drop_restart", f"{RUNS}test_a_plain_torchft_script_survives_a_kill", "not within 120 s"),
    left_out(
        "drop_restart",
        f"{RUNS}test_a_torchrun_script_runs_unchanged_and_a_death_restarts_its_own_group_only",
        "('RUNNING', None)",
    ),
    # The lighthouse: silences, stores, its own death.
    left_out(
        "blame_pauses", f"{SILENCE}test_a_lighthouse_that_was_stopped_drops_nobody[10.0]", "assert counters["
    ),
    left_out(
        "never_silent",
        f"{SILENCE}test_a_paused_group_is_told_of_to_every_supervisor_and_let_in_again_without_a_restart",
        "'NoneType' object is not subscriptable",
    ),
    left_out(
        "no_news",
        f"{SILENCE}test_an_evict_is_answered_before_its_own_news",
        "'NoneType' object is not subscriptable",
    ),
    left_out(
        "no_time_after_restart",
        f"{SILENCE}test_a_restart_of_the_lighthouse_leaves_everyone_time_to_be_heard_again",
        "{'silent': 3} != {'silent': 0}",
    ),
    left_out(
        "no_store_close",
        f"{STORES}test_the_death_of_the_primary_in_a_rendezvous_stalls_nobody",
        "they stalled for",
    ),
    left_out(
        "no_store_close",
        f"{STORES}test_an_evict_fails_at_once_whoever_is_in_the_store_of_that_quorum_or_comes_late",
        "they still wait",
    ),
    left_out(
        "one_helper",
        f"{STORES}test_a_helper_that_dies_is_replaced_and_nobody_waits_for_it",
        ">       with_store(bench, (0, 1), (1, 1))",
    ),
    left_out(
        "wait_for_helper",
        f"{STORES}test_a_helper_that_hangs_holds_up_neither_quorum_nor_evict_and_is_ended",
        "they still wait",
    ),
    left_out(
        "no_death_signal",
        f"{STORES}test_the_helper_dies_with_the_lighthouse_even_where_it_is_stopped",
        ">       eventually(lambda: not is_alive(helper))",
    ),
    left_out(
        "ignore_evict",
        "test_lighthouse_torchft.py::test_survivors_train_on_and_the_replacement_heals[sky-monarch]",
        "r0.g1 commits step",
    ),
    left_out(
        "let_copies_in",
        "test_lighthouse_torchft.py::test_a_second_copy_of_a_live_group_never_votes",
        "not within 20 s",
    ),
    left_out(
        "forget_state",
        "test_lighthouse_torchft.py::test_a_restart_of_the_lighthouse_loses_nobody",
        "quorum_id",
    ),
    left_out(
        "forget_state",
        "test_lighthouse_process.py::test_a_killed_one_is_replaced_on_the_same_port_and_goes_on",
        "quorum_id",
    ),
    # Terminals, strangers and damage.
    replaced(
        "launch/local.py",
        "start_new_session=True,",
        "start_new_session=False,",
        f"{TERMINAL}test_a_hang_up_of_the_terminal_ends_no_run[]",
        "assert 'LOST' == 'RUNNING'",
    ),
    replaced(
        "controller/api.py",
        "if not hmac.compare_digest(given, self._expected):",
        "if not given:",
        "test_attacks_peers.py::test_strangers_at_every_door_harm_nothing",
        "200 == 401",
    ),
    replaced(
        "launch/folder.py",
        "    folders += _bereft(root, {folder.run_id for folder in folders})\n",
        "",
        f"{FOLDERS}test_a_run_whose_folder_was_removed_is_still_listed_keeps_its_name_and_can_be_ended",
        "expected 1, got 0",
    ),
]

MUTANTS: list[Mutant] = [
    *_RUNNING,
    *FORKED,
    *SAVED,
    *KEPT,
    *DEALT,
    *ROUNDS,
    *SHARDED,
    *HEALED,
    *TOLD,
    *WATCHED,
    *HOSTS,
    *UNFIT,
    *PROVIDED,
    *ARCHIVED,
    *AWAY,
    *SCALED,
    *WIDE,
    *EXAMPLES,
    *ACTORS,
    *TUNNEL,
]
