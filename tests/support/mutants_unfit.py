"""The same for hosts that are looked at before their first step, for what is wrong in a job, and for communicators."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_UNIT = "tests/unit/test_unfit_hosts.py::"
_FENCED = "test_unfit_hosts.py::test_an_unfit_host_is_fenced_by_name_before_its_first_step_and_had_anew"
_COMM = "test_communicator.py::"
_WRONG = "test_misconfigured.py::"

UNFIT = [
    replaced(
        "controller/replacing.py",
        "        if event.unfit is None:\n",
        "        if True:\n",
        _FENCED,
        "it is had anew, once, and alone",
    ),
    # What is found comes after the host has dialled, in which it says that it is being looked at.
    Mutant(
        f"{_UNIT}test_nothing_starts_on_a_host_before_it_was_looked_at",
        "assert [",
        module="controller/verdict.py",
        old="            held = host.pairs or host.leaving or host.examining\n",
        new="            held = host.pairs or host.leaving\n",
    ),
    Mutant(
        f"{_UNIT}test_a_host_that_is_unfit_again_and_again_is_given_up_after_longer_and_longer_pauses",
        "assert [",
        module="controller/replacing.py",
        old='self._lose(host, f"unfit, {event.unfit}", gone=False, fault=True)',
        new='self._lose(host, f"unfit, {event.unfit}", gone=False, fault=False)',
    ),
    Mutant(
        f"{_UNIT}test_a_spare_that_is_being_looked_at_is_not_ready",
        "assert (1,) == ()",
        module="controller/spares.py",
        old="not (host.pairs or host.leaving or host.examining)",
        new="not (host.pairs or host.leaving)",
    ),
    Mutant(
        "tests/unit/test_wanted_devices.py::test_each_host_needs_what_its_own_groups_do",
        "a spare may get",
        module="config/examination.py",
        old="needs.get(host, fullest) for host in hosts",
        new="need for host, need in needs.items()",
    ),
    left_out(
        "try_in_vain",
        f"{_WRONG}test_a_command_that_cannot_be_started_is_given_up_after_three_tries_with_the_reason",
        "times in a row",
    ),
    replaced(
        "controller/controller.py",
        'if one["id"] not in self._book.fired',
        "if False",
        f"{_WRONG}test_a_rehearsed_fault_that_never_happened_is_told_at_the_end",
        "assert [] == [",
    ),
    replaced(
        "worker.py",
        '        promotion.announce(f"short {missing}")\n',
        "        pass\n",
        "test_fork_server.py::test_a_module_that_cannot_be_imported_is_told_once_and_nobody_is_called_warm",
        "it took over",
    ),
    replaced(
        "training/diloco_session.py",
        "return steps if self._target_step is None else min(steps, self._target_step)",
        "return steps",
        "test_diloco.py::test_steps_that_are_no_whole_number_of_rounds_end_with_a_shorter_one",
        "[15, 15] == [12, 12]",
    ),
    left_out(
        "comm_unwatched",
        f"{_COMM}test_the_death_of_a_rank_is_an_error_that_says_what_to_do",
        "nobody watched",
    ),
    left_out(
        "comm_ends_as_done",
        f"{_COMM}test_a_rank_whose_device_is_not_given_back_ends_itself_and_its_agent_starts_another",
        "not enough values to unpack",
    ),
]
