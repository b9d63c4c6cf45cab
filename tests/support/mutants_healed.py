"""The same for memory that is read directly, and for healing over it."""

from __future__ import annotations

from tests.support.mutant import Mutant, left_out, replaced

_RDMA = "test_rdma.py::"
_HEALING = "test_healing.py::"
_DONORS = "test_healing_donors.py::"
_UNWAITED = "test_healing_unwaited.py::"
_DEVICES = "tests/unit/test_device_memory.py::"

HEALED: list[Mutant] = [
    left_out(
        "forget_lost_pieces",
        f"{_RDMA}test_an_owner_that_dies_leaves_its_pieces_to_the_others",
        "the deadline has passed",
    ),
    left_out(
        "trust_digests",
        f"{_RDMA}test_a_hostile_owner_is_named_and_its_pieces_are_read_elsewhere[wrong]",
        "AssertionError",
    ),
    left_out(
        "withdraw_at_once",
        f"{_RDMA}test_what_an_operation_uses_is_not_freed[0.05-StaleHandleError]",
        "reading.error == outcome",
    ),
    left_out("ignore_epoch", f"{_RDMA}test_every_way_refuses_alike[tcp]", "DID NOT RAISE"),
    left_out(
        "trust_strangers",
        f"{_RDMA}test_nothing_is_read_of_who_cannot_prove_the_secret",
        "a proof, and nothing of the owner",
    ),
    replaced(
        "training/healing/striped.py",
        "        donors.met(self._neighbours)",
        "        pass",
        f"{_HEALING}test_a_group_heals_from_all_others_and_ends_bit_equal",
        "AssertionError",
    ),
    # From the second step of a heal on only the assigned donor gives.
    replaced(
        "training/manager.py",
        "            transport.give(quorum.max_step)",
        "            pass",
        f"{_UNWAITED}test_every_member_gives_in_each_step_of_a_heal",
        "also after the step in which they met",
    ),
    replaced(
        "training/healing/donors.py",
        "        if fits and donor.replica not in self._known:",
        "        if donor.replica not in self._known:",
        f"{_DONORS}test_whoever_is_at_the_step_is_found_in_each_step_of_a_heal",
        "AssertionError",
    ),
    # As TorchFT does it: beside the parameters.
    *(
        replaced(
            "training/healing/striped.py",
            "            found = None if path is None else mine.get(path)",
            "            found = None",
            f"{_DONORS}{test}",
            "AssertionError",
        )
        for test in (
            "test_a_new_process_has_its_state_and_little_else",
            "test_what_only_torch_can_get_at_heals_in_pieces",
        )
    ),
    # Without the rest, the newcomer has the parameters of the donors and moments of its own.
    replaced(
        "training/session.py",
        "optimizer.load_state_dict, optimizer.state_dict)\n        for key",
        "lambda state: None, optimizer.state_dict)\n        for key",
        f"{_HEALING}test_groups_that_are_killed_again_and_again_end_bit_equal",
        "AssertionError",
    ),
    # A step that failed closes the windows, too: who was reading has nobody left to read from.
    replaced(
        "training/healing/striped.py",
        "if self._source is None or not self._source.failed():",
        "if True:",
        f"{_HEALING}test_a_donor_that_dies_in_the_middle_costs_the_newcomer_no_second_heal",
        "AssertionError",
    ),
    replaced(
        "training/manager.py",
        "if self.torn and not self._healing and self.errored() is None:",
        "if False:",
        f"{_HEALING}test_a_group_whose_parameters_are_half_a_donors_does_not_train_on_with_them",
        "AssertionError",
    ),
    replaced(
        "training/healing/striped.py",
        "            self._withdraw()\n\n    def _withdraw",
        "            pass\n\n    def _withdraw",
        f"{_DONORS}test_what_is_withdrawn_before_a_commit_is_not_read_any_more",
        "DID NOT RAISE",
    ),
    left_out(
        "keep_everything",
        f"{_RDMA}test_what_is_right_already_is_left_as_it_is",
        "AssertionError",
    ),
    # Nobody says that the others wait: they do.
    replaced(
        "training/manager.py",
        "            self._transport.arrived()\n",
        "            pass\n",
        f"{_UNWAITED}test_nobody_waits_for_a_group_that_heals_and_all_end_bit_equal",
        "its state came over many steps",
    ),
    # What has come stays as it was: all of it is read once more at the end.
    replaced(
        "training/session.py",
        "            self._optimizer.step()\n            following.applied()",
        "            following.applied()",
        f"{_UNWAITED}test_nobody_waits_for_a_group_that_heals_and_all_end_bit_equal",
        "AssertionError",
    ),
    # Without the comparison at the end it has what it kept up with, right or not.
    replaced(
        "training/healing/reading.py",
        "    if not digest:\n",
        "    if False:\n",
        f"{_UNWAITED}test_what_it_could_not_know_of_is_read_again_at_the_end",
        "AssertionError",
    ),
    # The joiner computes while its parameters come.
    Mutant(
        f"{_DEVICES}test_a_backward_pass_under_way_may_go_on_while_its_parameters_are_written",
        "modified by an inplace operation",
        module="actors/device_memory.py",
        old="tensor.data.as_strided",
        new="tensor.detach().as_strided",
    ),
    Mutant(
        f"{_DEVICES}test_copies_go_beside_the_script_and_after_what_it_had_queued",
        "AssertionError",
        module="actors/device_memory.py",
        old="        self._fence.block(stream, device)\n",
        new="",
    ),
]
