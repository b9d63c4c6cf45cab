"""Which tests no mutant has to turn red, and why."""

from __future__ import annotations

from tests.support.mutants import CONTROLLER, FOLDERS, LIFECYCLE, RUNS, SESSION, SILENCE, STORES, TERMINAL

# Every test of these is in a row of `mutants.py`, or has its reason below.
FILES = (
    "test_attacks_folders.py",
    "test_attacks_peers.py",
    "test_attacks_processes.py",
    "test_attacks_terminal.py",
    "test_budgets.py",
    "test_controller_api.py",
    "test_controller_peers.py",
    "test_controller_process.py",
    "test_diloco.py",
    "test_door.py",
    "test_exits.py",
    "test_fork_server.py",
    "test_hosts.py",
    "test_lifecycle.py",
    "test_orphans.py",
    "test_provision.py",
    "test_provision_local.py",
    "test_provision_skypilot.py",
    "test_recovery.py",
    "test_session.py",
    "test_sharded.py",
    "test_standby.py",
    "test_watchdog.py",
)

# Tests of those files, and others that kill or stop something, that no mutant turns red, and why that is so.
_REFUSED = "asks what is refused: nothing has failed that could be recovered"
_SHOWN = "asks what is shown or stored of a run in which nothing is recovered"
_ENDED = "asks how a run ends that nobody disturbs"
_MOMENTS = "which step the signal meets is up to the moment: no mutant is certain"
_BESIDE = "its mutant stands beside it: "
WITHOUT = (
    {
        f"{FOLDERS}{test}": why
        for why, tests in {
            _SHOWN: (
                "test_a_damaged_run_folder_hides_no_other_run_and_can_be_looked_at_and_ended",
                "test_up_works_beside_damaged_run_folders",
                "test_secrets_are_removed_also_where_no_final_status_can_be_written",
                "test_sockets_find_a_place_where_state_and_temporary_folder_are_both_too_long",
                "test_a_run_works_in_a_state_folder_of_an_odd_name",
            ),
            _REFUSED: (
                "test_a_state_folder_that_cannot_be_used_is_named_with_a_way_out",
                "test_a_state_folder_whose_name_is_no_text_is_refused",
            ),
        }.items()
        for test in tests
    }
    | {
        "test_silent_controller.py::"
        "test_status_says_within_seconds_what_is_known_and_that_the_controller_is_stopped": _SHOWN
    }
    | {
        f"{CONTROLLER}{test}": why
        for why, tests in {
            _SHOWN: (
                "test_every_order_has_its_row_and_its_reason",
                "test_secrets_and_token_stay_out_of_everything_but_the_private_file",
            ),
            _ENDED: (
                "test_a_run_goes_from_its_agent_to_success",
                "test_down_during_setup_cancels_and_starts_no_group",
                "test_a_failed_setup_is_the_runs_end_with_its_last_lines",
            ),
        }.items()
        for test in tests
    }
    | {
        f"{TERMINAL}test_closed_standard_streams_are_no_error": _SHOWN,
        "test_exits.py::test_a_failure_is_shown_per_rank_and_fails_the_run_and_the_command": _SHOWN,
        "test_hosts.py::test_a_host_of_another_version_says_so_and_one_with_anothers_certificate_is_refused": (
            _REFUSED
        ),
        "test_diloco.py::test_the_ranks_of_a_group_average_in_every_step_and_the_groups_at_the_end": _ENDED,
        "test_diloco.py::test_undisturbed_it_is_torchfts_diloco_bit_for_bit": _ENDED,
        "test_exits.py::test_a_failed_setup_is_named_once_and_nothing_is_started": _ENDED,
        f"{LIFECYCLE}test_a_script_that_knows_nothing_of_us_runs_to_its_end": _ENDED,
        f"{LIFECYCLE}test_ctrl_c_while_the_command_itself_still_starts_leaves_nothing": _MOMENTS,
        "test_launch_local.py::test_a_launch_interrupted_at_any_moment_leaves_nothing_or_a_run_that_is_listed": (
            _MOMENTS
        ),
        "test_launch_local.py::test_a_name_is_free_again_after_its_run_and_taken_while_processes_are_left": (
            _REFUSED
        ),
        "test_session_channel.py::test_a_process_that_dies_is_noticed_at_once_and_leaves_the_socket_to_the_next": (
            "the kernel closes the connections of the dead: there is no step of ours to leave out"
        ),
        "test_controller_api.py::test_events_can_be_followed_and_resumed_by_id_until_the_run_ends": _SHOWN,
        "test_controller_api.py::test_a_thousand_groups_have_a_status": _SHOWN,
        "test_controller_api.py::test_no_route_answers_without_the_token": _REFUSED,
        "test_controller_api.py::test_bad_requests_are_refused_in_json_and_do_nothing": _REFUSED,
        "test_controller_api.py::test_only_the_owner_can_reach_the_socket": _REFUSED,
        "test_controller_peers.py::test_a_stranger_is_refused": _REFUSED,
        "test_controller_peers.py::test_an_agent_of_an_unknown_host_is_dropped_with_a_notice": _REFUSED,
        "test_store_helper.py::test_a_client_that_connects_before_the_helper_exists_is_served": _SHOWN,
        "test_head_cluster.py::test_a_head_that_does_not_answer_is_ended_from_outside": (
            f"{_BESIDE}test_what_cannot_be_taken_down_is_named"
        ),
        "test_head_lost.py::test_down_while_a_lost_head_is_followed_ends_the_run": (
            f"{_BESIDE}test_an_order_to_end_ends_a_head_that_is_still_being_launched"
        ),
        "test_provision_local.py::test_a_configuration_that_cannot_be_used_is_named": _REFUSED,
        "test_provision_skypilot.py::test_a_task_ends_its_cluster_itself_and_holds_its_secret_in_one_place": _SHOWN,
        "test_provision_skypilot.py::test_what_the_clouds_say_is_told_with_what_it_means": _SHOWN,
        "test_healing.py::test_a_newcomer_that_dies_in_the_middle_of_its_heal_holds_nobody_up": (
            "the kernel closes the connections of the dead: there is no step of ours to leave out"
        ),
        "test_healing_unwaited.py::test_groups_that_are_killed_while_one_heals_end_bit_equal": (
            f"{_BESIDE}test_nobody_waits_for_a_group_that_heals_and_all_end_bit_equal"
        ),
        "test_rdma.py::test_a_dead_owner_is_told_from_one_that_hangs": _REFUSED,
        "test_rdma.py::test_a_handle_of_an_owner_that_was_restarted_is_stale": _REFUSED,
        f"{SILENCE}test_a_lighthouse_that_is_starved_drops_nobody": (
            "how long it is starved is up to the kernel; the mutant of the same step is that of the stopped one"
        ),
        "test_actor_examples.py::test_a_replica_group_is_killed_and_all_end_with_the_same_weights": (
            f"{_BESIDE}test_a_killed_group_comes_back_heals_and_all_end_bit_equal"
        ),
        "test_actors_care.py::test_the_stacks_of_a_process_are_told_even_where_it_holds_pythons_lock": _SHOWN,
        "test_actors_stress.py::test_ranks_killed_at_random_come_back_and_every_call_ends": _MOMENTS,
        "test_actors_stress_hosts.py::"
        "test_ranks_and_hosts_killed_at_random_come_back_every_call_ends_and_nothing_is_held": _MOMENTS,
        "test_actor_programs.py::test_a_stopped_process_slows_who_writes_to_it_and_nobody_else_and_loses_nothing": (
            "nothing has failed that could be recovered"
        ),
        "test_actor_programs.py::test_thirty_programs_that_are_killed_leave_nothing": (
            "its mutant is of test_nothing_outlives_the_program, which kills one"
        ),
        "test_actors_standby.py::test_a_policy_takes_those_that_stand_by": (
            f"{_BESIDE}test_one_that_stands_by_takes_the_place_and_another_one_comes_after_it"
        ),
        "test_actors_stress.py::test_deaths_one_and_eight_at_once_are_told_within_milliseconds": (
            f"{_BESIDE}test_the_owner_is_told_once_and_in_milliseconds_and_brings_the_rank_back"
        ),
        f"{STORES}test_without_a_helper_quorums_form_and_that_death_stalls_everyone": "is a mutant itself",
        f"{RUNS}test_rehearsed_faults_of_the_session_name_their_cause_on_the_first_screen": _SHOWN,
        f"{SESSION}test_a_death_a_hang_and_a_missing_member_cost_the_mesh_moments": (
            f"{_BESIDE}test_without_the_cut_a_death_stalls_who_is_not_its_neighbour"
        ),
        f"{SESSION}test_without_the_cut_a_death_stalls_who_is_not_its_neighbour": "is a mutant itself",
    }
)
