"""The same for what standbys are forked from, for checkpoints, and for the data that is trained on."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_FORK = "test_fork_server.py::"
_KILLS = "test_checkpoint_kills.py::"
_DATA = "test_training_data.py::"
_SESSION = "test_session.py::"
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
        "numpy_random.seed()",
        "pass",
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
        "there is a new one",
    ),
    left_out(
        "keep_dead_fork_server",
        f"{_FORK}test_a_hung_fork_server_is_replaced_and_keeps_no_death_from_being_noticed",
        "not in fork_servers",
    ),
    replaced(
        "fork_server.py",
        "contextlib.suppress(AttributeError, ValueError)",
        "contextlib.suppress(ZeroDivisionError)",
        f"{_FORK}test_whatever_an_import_does_to_its_process_standbys_come_at_once",
        "--serve",
    ),
    left_out(
        "wait_for_unwanted",
        f"{_FORK}test_a_fork_server_that_hangs_in_a_request_holds_up_no_end",
        "less than what a standby is waited for",
    ),
    left_out(
        "wait_for_dead_agent",
        f"{_FORK}test_who_is_half_born_when_its_agent_dies_does_not_wait_for_it",
        "TimeoutExpired",
    ),
    replaced(
        "controller/api.py",
        "if time.monotonic() - spoke_s >= _KEEP_ALIVE_S:",
        "if False:",
        "test_controller_api.py::test_a_run_without_news_is_told_from_a_controller_without_a_voice",
        "ReadTimeout",
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

DEALT = [
    replaced(
        "training/sampler.py",
        "if self._bound().replica not in self._position.members and not self._position.open:",
        "if False:",
        f"{_DATA}test_no_sample_is_used_twice_in_an_epoch_and_the_lost_ones_are_listed[unlucky-lost2]",
        "Error",
    ),
    replaced(
        "training/sampler.py",
        "if not contributed.get(replica)",
        "if False",
        f"{_DATA}test_no_sample_is_used_twice_in_an_epoch_and_the_lost_ones_are_listed[disturbed-lost1]",
        "Error",
    ),
    replaced(
        "training/contributions.py",
        "return self._participants * self._world_size * self._unit / self.total if self.total else 1.0",
        "return 1.0",
        f"{_DATA}test_the_mean_is_one_over_samples_at_every_world_size",
        "Error",
    ),
    replaced(
        "training/session.py",
        '("scheduler", scheduler)',
        '("scheduler", None)',
        f"{_DATA}test_every_group_has_the_learning_rate_of_an_undisturbed_run",
        "step ",
    ),
    replaced(
        "training/sampler.py",
        "seed=self._bound().seed, epoch",
        "seed=__import__('os').getpid(), epoch",
        f"{_DATA}test_the_same_seed_and_the_same_failures_give_the_same_bits",
        "Error",
    ),
    replaced(
        "training/session.py",
        "            self._group.cut()\n        counts =",
        "            pass\n        counts =",
        f"{_DATA}test_a_heal_that_fails_stalls_nobody_and_is_tried_again",
        "Error",
    ),
    replaced(
        "training/session.py",
        "self._averaged or self._replaced or self.finished",
        "self._averaged or self.finished",
        f"{_SESSION}test_what_was_computed_before_the_checkpoint_was_read_is_not_used",
        "as if there had been no interruption",
    ),
    replaced(
        "training/collectives.py",
        "*([contributions.within(inner)] if contributions else [])",
        "*[]",
        f"{_SESSION}test_the_ranks_of_a_group_weigh_as_much_as_their_samples[False]",
        "Error",
    ),
]
