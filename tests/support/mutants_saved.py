"""The same for what standbys are forked from, for checkpoints, and for what failures leave."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_FORK = "test_fork_server.py::"
_KILLS = "test_checkpoint_kills.py::"
_EVIDENCE = "test_evidence.py::"
_OWN_MARK = ('request["spawn_id"]', 'os.environ["SKY_MONARCH_SPAWN_ID"]')

FORKED = [
    replaced(
        "fork_server.py",
        *_OWN_MARK,
        f"{_FORK}test_a_forked_standby_is_a_child_of_the_agent_and_becomes_the_rank",
        "each tree has a mark of its own",
    ),
    replaced(
        "fork_server.py",
        *_OWN_MARK,
        f"{_FORK}test_what_a_forked_rank_leaves_behind_without_exec_goes_with_it",
        "not within",
    ),
    replaced(
        "fork_server.py",
        "    random.seed()\n",
        "",
        f"{_FORK}test_forked_standbys_share_no_random_numbers",
        "draws",
    ),
    replaced(
        "fork_server.py",
        "if threads > 1:",
        "if False:",
        f"{_FORK}test_imports_that_bear_no_fork_are_told_and_done_by_each_standby",
        "1 more threads running",
    ),
    left_out(
        "keep_dead_fork_server",
        f"{_FORK}test_without_the_fork_server_standbys_come_all_the_same",
        "not within",
    ),
    left_out(
        "keep_dead_fork_server",
        f"{_FORK}test_a_hung_fork_server_is_replaced_and_keeps_no_death_from_being_noticed",
        "not within",
    ),
]

SAVED = [
    # Visible before it is complete.
    replaced(
        "training/checkpoint/folder.py",
        '        tmp = self.path / f"{_TMP}{name}"\n        tmp.mkdir',
        "        tmp = self.path / name\n        tmp.mkdir",
        f"{_KILLS}test_killed_before_any_operation_of_a_save_a_whole_checkpoint_is_loaded",
        "assert",
    ),
    # The one before is removed first.
    replaced(
        "training/checkpoint/folder.py",
        "        for it in complete:\n            if it.name == newest or",
        "        for it in complete:\n            self.discard(it.name)\n            if it.name == newest or",
        f"{_KILLS}test_writers_that_know_nothing_of_each_other_leave_whole_checkpoints",
        "assert",
    ),
    replaced(
        "training/checkpoint/saving.py",
        "            self._decline(self._declined.popleft())",
        "            self._declined.popleft()",
        f"{_KILLS}test_a_rank_that_is_still_busy_costs_its_group_that_checkpoint_only",
        "nobody waits",
    ),
    replaced(
        "training/checkpoint/contents.py",
        "like = param if isinstance(param, DTensor)",
        "like = None if isinstance(param, DTensor)",
        f"{_KILLS}test_the_ranks_of_a_group_save_their_shards_together_and_load_them_in_groups_of_any_size",
        "assert",
    ),
    Mutant(
        "tests/unit/test_checkpoint.py::test_a_damaged_one_is_named_and_the_one_before_is_taken[a bit]",
        "failed",
        module="training/checkpoint/saving.py",
        old="                self.folder.verify(it)\n",
        new="",
    ),
    replaced(
        "training/checkpoint/store.py",
        "        upload_id = journal.get(file)",
        "        upload_id = None",
        "test_checkpoint_store.py::test_the_next_process_uploads_only_the_parts_that_are_missing",
        "assert [1, 2, 3] == [2, 3]",
    ),
    replaced(
        "training/state.py",
        "        manager.load_state_dict(parts[MANAGER])\n        return True",
        "        return False",
        "test_session.py::test_all_groups_go_on_from_the_newest_checkpoint",
        "assert",
    ),
    replaced(
        "controller/controller.py",
        "                for row in news:\n",
        "                for row in ():\n",
        "test_checkpoint_runs.py"
        "::test_a_save_that_fails_is_an_event_and_all_groups_killed_at_once_go_on_from_the_last_good_one",
        "not within",
    ),
]

_REGISTER = "faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)"

TOLD = [
    # A rank that hangs does not know the signal; it must not be sent then, for it would end the rank.
    replaced(
        "stacks.py",
        _REGISTER,
        "pass",
        f"{_EVIDENCE}test_each_failure_says_where_and_with_what_numbers",
        "assert None == ",
    ),
    replaced(
        "tracebacks.py",
        "exception=exception, where=own or library)",
        "exception=exception, where=library or own)",
        f"{_EVIDENCE}test_each_failure_says_where_and_with_what_numbers",
        "not the line in json",
    ),
    replaced(
        "controller/evidence.py",
        'culprit(event.get("traceback") or tail)',
        "culprit(tail)",
        f"{_EVIDENCE}test_a_script_decorated_with_record_tells_its_exception_though_it_prints_nothing",
        "assert None == 'RuntimeError",
    ),
    replaced(
        "training/transport.py",
        "heal, self._heal = self._heal, None",
        "heal = None",
        "test_training_runs.py::test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal",
        "assert None in",
    ),
    replaced(
        "controller/controller.py",
        "if self._book.recoveries.awaits(progress):",
        "if False:",
        "test_training_runs.py::test_a_killed_group_comes_back_from_its_standby_and_all_end_bit_equal",
        "NoneType",
    ),
    replaced(
        "launch/folder.py",
        "            excerpt.keep(self)\n",
        "            del excerpt\n",
        "test_debug_bundle.py::test_a_bundle_of_a_live_a_lost_and_an_ended_run_tells_all_but_its_secrets",
        "KeyError: 'logs/r0-0/g1.log'",
    ),
]
