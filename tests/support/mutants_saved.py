"""The same for what standbys are forked from, for checkpoints, for the journal and for what is adopted."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_FORK = "test_fork_server.py::"
_KILLS = "test_checkpoint_kills.py::"
_LOST = "test_journal_lost.py::"
_ADOPTION = "test_adoption.py::"
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

KEPT = [
    # The journal is damaged, gone, or on a full disk.
    replaced(
        "controller/policy.py",
        "                self._adopt(group, snapshot, event.mono_ns)\n",
        "                pass\n",
        f"{_LOST}test_without_its_journal_a_run_goes_on_with_what_the_agents_know[fill_with_noise]",
        "what lives is adopted",
    ),
    replaced(
        "controller/rebuild.py",
        '        lost = f"it cannot be read ({type(error).__name__}: {error}) and is kept as {journal.set_aside()}"\n',
        "        raise\n",
        f"{_LOST}test_without_its_journal_a_run_goes_on_with_what_the_agents_know[break_a_row]",
        "Error: [Errno 1",
    ),
    replaced(
        "controller/rebuild.py",
        '    final = _final(run_dir / "final.json")\n',
        "    final = None\n",
        f"{_LOST}test_a_run_that_ended_stays_ended_without_its_journal",
        "what the agent waits for",
    ),
    replaced(
        "controller/controller.py",
        "            self._withheld |= acks\n",
        "            for host, seq in acks.items():\n"
        '                self._agents.send(host, {"type": "ack", "seq": seq})\n',
        f"{_LOST}test_a_run_on_a_full_disk_goes_on_to_its_end_and_loses_no_event[True]",
        "what is not stored is not acked",
    ),
    replaced(
        "controller/controller.py",
        "        (self._reserve.give if self._final.exists() else self._reserve.take)()\n",
        "",
        f"{_LOST}test_a_run_on_a_full_disk_goes_on_to_its_end_and_loses_no_event[False]",
        "the agent waits for",
    ),
    # Who supervises is killed.
    replaced(
        "controller/controller.py",
        "        self._append(row)  # no act without its row\n",
        "",
        f"{_ADOPTION}test_a_controller_that_is_killed_at_any_command_or_ack_is_followed_by_one_that_adopts",
        "I2",
    ),
    left_out(
        "drop_restart",
        f"{_ADOPTION}test_a_controller_a_lighthouse_and_a_rank_killed_together_cost_one_group_one_restart",
        "not within",
    ),
    replaced(
        "sdk/_up.py",
        "    if (lost := _lost(plan)) is not None and lost.resume(timeout_s=timeout_s):\n        return lost\n",
        "",
        f"{_ADOPTION}test_up_of_the_same_job_takes_a_lost_run_up_again_under_its_id_and_with_its_budgets",
        "taken up again",
    ),
    replaced(
        "sdk/_up.py",
        "    return Run(folder) if same else None\n",
        "    return Run(folder)\n",
        f"{_ADOPTION}test_up_of_another_job_of_that_name_leaves_the_lost_run_alone",
        "!=",
    ),
    replaced(
        "cli/attach.py",
        "if run.resume():",
        "if False:",
        f"{_ADOPTION}test_attach_takes_a_lost_run_up_again_and_follows_it_to_its_end",
        "1 == 0",
    ),
    replaced(
        "controller/policy.py",
        "        if group.phase.final or self._stopping(group):\n            final",
        "        if self._stopping(group):\n            final",
        f"{_ADOPTION}test_a_run_whose_work_was_done_when_it_was_lost_has_succeeded_and_is_not_run_again",
        "assert",
    ),
]
