"""The same for the journal, and for what is adopted."""

from __future__ import annotations

from tests.support.mutant import left_out, replaced

_LOST = "test_journal_lost.py::"
_ADOPTION = "test_adoption.py::"

KEPT = [
    # The journal is damaged, gone, or on a full disk.
    replaced(
        "controller/controller.py",
        "            await self._write_final()\n",
        "            self._reserve.write(self._final, self.status())\n",
        f"{_LOST}test_a_run_whose_last_status_has_no_place_ends_all_the_same[True]",
        "not within",
    ),
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
        "controller/controller.py",
        '                **self._untold(item.host, {group["replica"] for group in hello["groups"]}),\n',
        "",
        f"{_ADOPTION}test_what_an_agent_began_before_anybody_heard_of_it_is_not_begun_again_by_the_next",
        "its number is not given twice",
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
