"""Steps of the provisioner that are left out: hosts that are lost, launched twice, or never let go."""

from __future__ import annotations

from tests.support.mutant import replaced

PROVISION = "test_provision.py::"
LOCAL = "test_provision_local.py::"
SKYPILOT = "test_provision_skypilot.py::"
MOVING = "test_moving.py::"

PROVIDED = [
    # Candidates.
    replaced(
        "provision/candidates.py",
        "key=lambda choice: (choice != first, choice)",
        "key=lambda choice: (choice != first, -choice)",
        f"{PROVISION}test_each_choice_is_tried_once_in_order_and_all_hosts_go_where_the_first_came_up",
        "the first two are tried by one host only",
    ),
    replaced(
        "provision/candidates.py",
        "if self._joined[host][1] < self._round.number:",
        "if False:",
        f"{PROVISION}test_where_every_choice_fails_the_reasons_of_all_are_told_once_for_the_whole_job",
        "not once for each host",
    ),
    replaced(
        "provision/candidates.py",
        "if kind is Kind.CREDENTIALS or not self._left():",
        "if not self._left():",
        f"{PROVISION}test_wrong_credentials_end_the_search_at_once",
        "attempt 1 is failed",
    ),
    replaced(
        "provision/host.py",
        'left=tried.left if tried else ""',
        'left=""',
        f"{PROVISION}test_a_failed_launch_whose_cluster_does_not_go_is_told_as_that_by_each_process_until_it_is_gone",
        "something of it is left",
    ),
    replaced(
        "provision/host.py",
        "Phase.LAUNCHING), usd_per_hour=price)",
        "Phase.LAUNCHING))",
        f"{PROVISION}test_a_launch_is_told_with_the_price_of_the_plan_from_its_beginning",
        "its launch has a price",
    ),
    replaced(
        "provision/requests.py",
        " or bool(self.left)\n",
        "\n",
        f"{PROVISION}test_what_a_failed_launch_left_behind_is_told_to_be_down_beside_the_next_attempt",
        "demo-h0 attempt 1 is down",
    ),
    replaced(
        "provision/host.py",
        "if error.kind is not Kind.ERROR or not left:",
        "if True:",
        f"{PROVISION}test_an_error_on_the_way_is_tried_again_a_few_times_and_a_refusal_is_not",
        "demo-h0 attempt 1 is launched",
    ),
    replaced(
        "provision/candidates.py",
        "return self._choice if self._up else None",
        "return None",
        f"{PROVISION}test_a_host_without_capacity_costs_no_good_one_and_never_stays_in_between",
        "the job stays in one place",
    ),
    replaced(
        "provision/candidates.py",
        "self._up.discard(host)",
        "pass",
        f"{PROVISION}test_where_all_hosts_are_lost_the_job_may_move",
        "attempt 2 is launched",
    ),
    # Hosts of different sizes.
    replaced(
        "provision/host.py",
        "if (problem := self._place(turn.choice)) is not None:",
        "if (problem := None) is not None:",
        f"{MOVING}test_groups_are_placed_as_the_place_that_has_room_needs_it_and_no_other_host_is_launched",
        "are up",
    ),
    replaced(
        "controller/placing.py",
        '"placed": moved}',
        '"placed": None}',
        f"{MOVING}test_where_groups_are_is_known_to_the_next_controller",
        "each has its host",
    ),
    replaced(
        "controller/moving.py",
        "if state.settled:",
        "if False:",
        f"{MOVING}test_a_job_that_has_been_somewhere_goes_only_where_its_groups_fit_and_the_reason_is_told",
        "== 400",
    ),
    # Hosts that are lost.
    replaced(
        "provision/provisioner.py",
        "if record is not None and record.phase is Phase.UP:",
        "if record is not None:",
        f"{PROVISION}test_a_lost_host_is_launched_alone_and_asked_for_no_more",
        "assert all(",
    ),
    replaced(
        "provision/watch.py",
        "if now_s - since_s >= self._limits.confirm_s:",
        "if True:",
        f"{PROVISION}test_one_answer_that_all_hosts_are_gone_and_any_that_fails_prove_nothing",
        "all of that was answered",
    ),
    replaced(
        "provision/host.py",
        "        self._older_gone()\n        self._leaving.retire(record)\n",
        "        self._leaving.retire(record)\n",
        f"{PROVISION}test_an_older_attempt_goes_beside_the_next_one_and_those_before_it_go_first",
        "one goes at a time",
    ),
    replaced(
        "provision/provisioner.py",
        "            self._leaving.start()\n",
        "",
        f"{PROVISION}test_an_older_attempt_that_is_going_when_the_provisioner_is_killed_goes_all_the_same",
        "demo-h0 attempt 1 is down",
    ),
    replaced(
        "provision/host.py",
        "        self._await(lambda: None if self._leaving.left(self.name) else True)\n",
        "        pass\n",
        f"{PROVISION}test_down_is_told_only_when_the_older_attempt_is_gone_too",
        'assert "down" not in',
    ),
    replaced(
        "provision/host.py",
        "if failure is not None and beside and failure.kind in _IN_THE_WAY:",
        "if False:",
        f"{PROVISION}test_a_launch_for_which_there_is_no_room_beside_the_one_that_goes_is_tried_again_without_it",
        "demo-h0 attempt 2 is launched",
    ),
    replaced(
        "provision/watch.py",
        "        self._ask_early(up, now_s)\n",
        "",
        f"{PROVISION}test_a_silent_host_is_asked_for_at_once_and_only_certainty_is_believed",
        "a few times, and no more",
    ),
    replaced(
        "provision/skypilot.py",
        "for name in noted if name not in found",
        "for name in clusters if name not in found",
        f"{SKYPILOT}test_of_a_silent_host_skypilot_is_asked_at_once_and_believed_where_it_has_looked",
        "an empty answer proves nothing",
    ),
    replaced(
        "provision/host.py",
        "if shared.requests.lost or order.replaces is not None:",
        "if False:",
        f"{PROVISION}test_an_attempt_that_only_the_controller_remembers_is_taken_down_as_well",
        "attempt 3 is down",
    ),
    replaced(
        "provision/host.py",
        "if not order.enrolment:",
        "if False:",
        f"{PROVISION}test_a_host_is_launched_with_the_newest_enrolment_and_never_without",
        "demo-h0 attempt 1 is failed",
    ),
    # Down.
    replaced(
        "provision/host.py",
        "            if changed:\n                self._stop.set()\n",
        "            if changed:\n",
        f"{PROVISION}test_down_ends_a_launch_in_any_phase_and_twice_is_fine",
        "demo-h1 attempt 1 is down",
    ),
    replaced(
        "provision/host.py",
        "while (left := self._down_within(known.cluster, shared.limits.down_s)) is not None:",
        "if (left := self._down_within(known.cluster, shared.limits.down_s)) is not None:",
        f"{PROVISION}test_a_host_that_does_not_go_is_told_of_and_taken_down_all_the_same",
        "assert provider.clusters == {}",
    ),
    replaced(
        "provision/host.py",
        "elif order.attempt in found.values():",
        "elif False:",
        f"{PROVISION}test_a_cluster_of_the_same_name_that_is_not_ours_is_never_touched",
        "demo-h0 attempt 1 is failed",
    ),
    # Bounds, and the controller.
    replaced(
        "provision/shared.py",
        "if self.launching < self.limits.launches and self.queue and self.queue[0] is waiter:",
        "if self.queue and self.queue[0] is waiter:",
        f"{PROVISION}test_launches_are_bounded_and_first_come_is_first_served",
        "all others wait",
    ),
    replaced(
        "provision/client.py",
        "            self._closing.wait(backoff.delay_s())\n",
        "            return\n",
        f"{PROVISION}test_no_report_is_lost_while_the_controller_is_away_and_a_new_one_is_told_what_it_asks",
        "demo-h1 attempt 1 is launched",
    ),
    replaced(
        "provision/client.py",
        "if 400 <= answer.status_code < 500 and answer.status_code not in (401, 408, 429):",
        "if False:",
        f"{PROVISION}test_a_report_that_is_refused_is_dropped_and_one_that_fails_is_not",
        "not within",
    ),
    # Restarts.
    replaced(
        "provision/requests.py",
        "        self._lost = False\n        self._read()\n",
        "        self._lost = False\n",
        f"{PROVISION}test_a_provisioner_that_starts_again_launches_nothing_twice_and_tells_what_is",
        "attempt 1 is launched",
    ),
    replaced(
        "provision/host.py",
        "if shared.requests.lost and order.attempt in found.values():",
        "if False:",
        f"{PROVISION}test_a_damaged_file_of_requests_costs_no_host",
        "assert 2 == 1",
    ),
    replaced(
        "provision/host.py",
        "            self._shared.fail()\n",
        "",
        f"{PROVISION}test_a_defect_of_a_hosts_thread_ends_the_provisioner",
        "running.closing.wait(10)",
    ),
    # Processes of this machine.
    replaced(
        "provision/local.py",
        "start_new_session=True,",
        "start_new_session=False,",
        f"{LOCAL}test_a_host_has_its_secrets_in_its_environment_alone_and_a_session_of_its_own",
        "assert os.getsid(pid) == pid",
    ),
    replaced(
        "provision/tree.py",
        " or _carries(pid, mark)",
        "",
        f"{LOCAL}test_down_ends_the_whole_tree_and_nothing_of_another_host",
        "assert not any(",
    ),
    replaced(
        "provision/watch.py",
        "self._ended(notice.host, notice.attempt, notice.reason)",
        "pass",
        f"{LOCAL}test_a_host_that_is_killed_in_its_setup_counts_as_lost_and_comes_back_alone",
        "its agent was killed by SIGKILL",
    ),
    replaced(
        "provision/requests.py",
        "        self._lost = False\n        self._read()\n",
        "        self._lost = False\n",
        f"{LOCAL}test_hosts_outlive_the_provisioner_and_the_next_one_goes_on_with_them",
        "demo-h0 attempt 1 is launched",
    ),
    replaced(
        "provision/local.py",
        "if left := Tree(None, life.tree.mark).end(grace_s=0.0):",
        "if left := ():",
        f"{LOCAL}test_a_host_whose_starter_was_killed_before_it_wrote_that_down_is_not_there_twice",
        "assert not is_alive(before)",
    ),
    replaced(
        "provision/__main__.py",
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):",
        "for number in (signal.SIGTERM, signal.SIGINT):",
        f"{LOCAL}test_notices_and_prints_end_nothing_sigterm_ends_it_at_once_and_hosts_stay",
        "demo-h1 attempt 1 is down",
    ),
    # SkyPilot's requests.
    replaced(
        "provision/skypilot.py",
        "request_id = self._asked(self._requests.get(order.host))",
        "request_id = None",
        f"{SKYPILOT}test_a_provisioner_that_is_ended_while_it_waits_goes_on_waiting_for_the_same_request",
        "asked once",
    ),
    replaced(
        "provision/skypilot.py",
        "return self._sdk.find_launch(record.cluster, record.asked_ms - _SKEW_MS)",
        "return None",
        f"{SKYPILOT}test_one_that_was_killed_between_asking_and_writing_finds_its_request",
        "asked once",
    ),
    replaced(
        "provision/skypilot.py",
        "                self._cancel(request_id, stop)\n",
        "                pass\n",
        f"{SKYPILOT}test_down_cancels_a_launch_that_is_under_way",
        "nothing comes up after it was taken down",
    ),
    replaced(
        "provision/skypilot.py",
        "if not error.is_away:  # else",
        "if True:  # else",
        f"{SKYPILOT}test_a_server_that_is_away_is_waited_for_and_never_asked_twice",
        "asked once",
    ),
    replaced(
        "provision/skypilot.py",
        "if error.is_forgotten:  # the server",
        "if False:  # the server",
        f"{SKYPILOT}test_a_server_that_has_forgotten_a_request_is_asked_anew_once_nothing_of_it_is_left",
        "one job on it",
    ),
    replaced(
        "provision/skypilot.py",
        "if cluster in found else Seen.GONE",
        "if cluster in found else Seen.UNKNOWN",
        f"{SKYPILOT}test_a_cluster_that_is_not_in_two_answers_has_ended",
        "demo-h1 attempt 1 is ended",
    ),
    replaced(
        "provision/skypilot.py",
        "                raise ProvisionError(text, kind=kind)\n",
        "                pass\n",
        f"{SKYPILOT}test_a_launch_without_an_end_is_no_capacity_and_cancelled",
        "demo-h0 attempt 1 is failed",
    ),
]
