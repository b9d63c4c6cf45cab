"""The same for the processes of the actor API."""

from __future__ import annotations

from tests.support.mutant import left_out, replaced

_ENDS = "test_actors_supervision.py::"
_HOSTS = "test_actors_hosts.py::"
_STANDBY = "test_actors_standby.py::"
_AGAIN = "        self._make_again(ranks, end)\n"

_TREES = "test_actors_trees.py::"
_FOLDS = "test_actors_folding.py::"
_PLACES = "test_actors_places.py::"
_SPMD = "test_actors_spmd.py::"
_ODD = "test_actors_oddities.py::"
_CARE = "test_actors_care.py::"

ACTORS = [
    replaced(
        "actors/runtime.py",
        "if self._spawner is None or (self._spawner.over and not self._ending):",
        "if self._spawner is None:",
        f"{_ENDS}test_after_the_end_of_what_starts_processes_all_can_be_replaced",
        "the process that starts others is gone",
    ),
    replaced(
        "actors/zygote.py",
        "        if self.made and os",
        "        if os",
        f"{_ENDS}test_the_end_of_an_owner_ends_what_it_has_spawned_and_nothing_else[killed]",
        "No such file or directory",
    ),
    replaced(
        "actors/owned.py",
        "            wanted -= self.gone\n",
        "",
        f"{_ODD}test_a_policy_leaves_out_what_was_stopped",
        "DID NOT RAISE",
    ),
    replaced(
        "actors/owned.py",
        "        if rank in self.gone:\n",
        "        if self.gone:\n",
        f"{_ODD}test_a_part_of_a_mesh_is_stopped_and_the_rest_is_watched_as_before",
        "it is told",
    ),
    replaced(
        "actors/hosting.py",
        "except BaseException:  # noqa: BLE001  (a handler that raises",
        "except Exception:  # noqa: BLE001  (a handler that raises",
        f"{_ODD}test_an_owner_that_wants_to_exit_has_not_handled_a_failure_and_goes_on",
        "it climbs",
    ),
    replaced(
        "actors/strays.py",
        "                self._refuse(actor_id)\n",
        "                pass\n",
        f"{_CARE}test_a_call_to_an_actor_that_a_process_does_not_have_fails_instead_of_waiting",
        "gave no answer within",
    ),
    replaced(
        "actors/strays.py",
        "            self._waiting[actor_id] = 0.0\n",
        "            pass\n",
        f"{_CARE}test_who_has_spawned_an_actor_is_asked_whether_it_comes_so_none_that_does_not_is_waited_for",
        "its spawner is asked",
    ),
    replaced(
        "actors/strays.py",
        "_ASKED_S = 10.0\n",
        "_ASKED_S = 1.0\n",
        f"{_CARE}test_a_spawn_that_is_late_is_waited_for_as_long_as_its_spawner_lives",
        "there is no such actor in this process",
    ),
    replaced(
        "actors/spmd.py",
        "    return key is not None and said == [(key, rank, len(said)) for rank in range(len(said))]\n",
        "    return key is not None\n",
        f"{_SPMD}test_a_rank_that_dies_ends_the_call_and_is_a_rank_of_the_next_generation_once_it_is_back",
        "KeyError: 'RANK'",
    ),
    replaced(
        "actors/process_group.py",
        "            _leave(dist)\n",
        "",
        f"{_SPMD}test_a_process_group_is_formed_again_after_a_rank_was_replaced",
        "twice",
    ),
    replaced(
        "actors/lighthouse.py",
        "    os._exit(0)\n",
        "",
        "test_actors_replicas.py::test_a_lighthouse_ends_with_its_program_and_leaves_nothing",
        "it ends",
    ),
    replaced(
        "actors/replicas.py",
        "                self._replace(replica)\n",
        "",
        "test_actors_replicas.py::test_a_group_that_fails_is_replaced_whole_and_comes_to_its_end[True]",
        "restarts are allowed",
    ),
    replaced(
        "actors/replicas.py",
        "                self._evict(replica)\n",
        "",
        "test_actors_replicas.py::test_a_group_that_fails_once_more_than_it_may_or_when_it_is_alone_is_given_up",
        "and is not waited for",
    ),
    replaced(
        "actors/replicas.py",
        "                self._replace(replica)\n",
        "",
        "test_actors_replicas.py::test_a_killed_group_comes_back_heals_and_all_end_bit_equal[sizes0]",
        "restarts are allowed",
    ),
    replaced(
        "actors/owned.py",
        "            self.ends.update(dict.fromkeys(ranks, (time.monotonic(), failure)))\n",
        "",
        f"{_ENDS}test_a_pending_call_to_the_dead_fails_at_once_and_says_who_died_how",
        "trainer[1] is dead: the process",
    ),
    replaced(
        "actors/owned.py",
        _AGAIN,
        "",
        f"{_ENDS}test_a_respawned_rank_answers_in_its_place_and_the_whole_mesh_with_it",
        "gave no answer within",
    ),
    replaced(
        "actors/owned.py",
        "            self.respawn(sorted(wanted), 60.0, ended=(ranks[0], proc))\n",
        "            pass\n",
        f"{_ENDS}test_a_policy_replaces[one_for_one-replaced0]",
        "not within",
    ),
    replaced(
        "actors/owned.py",
        "                if rank in ranks\n",
        "                if rank in ranks[:1]\n",
        f"{_STANDBY}test_several_ranks_are_replaced_at_once_and_their_actors_made_side_by_side",
        ">       again = list(mesh.pid.call()",
    ),
    replaced(
        "actors/owned.py",
        '        self.runtime.node.hang_up(proc.address, "the process has ended")\n',
        "",
        "test_actor_programs.py::test_a_death_is_told_though_a_child_of_the_dead_holds_its_sockets_open",
        "gave no answer within",
    ),
    replaced(
        "actors/spares.py",
        "        # Not here: this thread hears of ends, and waits for nobody.\n        self.fill_later()\n",
        "",
        f"{_STANDBY}test_one_that_stood_by_and_died_is_replaced",
        "1 stand by",
    ),
    replaced(
        "actors/owned.py",
        "start(fresh, spares, ",
        "start(fresh, [], ",
        f"{_STANDBY}test_one_that_stands_by_takes_the_place_and_another_one_comes_after_it",
        "it was there before",
    ),
    replaced(
        "actors/owned.py",
        "            self._put(ranks, [], end)\n",
        "            raise\n",
        f"{_STANDBY}test_one_that_stood_by_and_is_dying_is_not_waited_for",
        "not made again",
    ),
    replaced(
        "actors/restarts.py",
        "if len(self._ends) >= self.intensity:",
        "if False:",
        f"{_ENDS}test_more_ends_than_the_policy_allows_are_told",
        "not within",
    ),
    replaced(
        "actors/runtime.py",
        'method = "failure" if actor == CONTROL else "__supervise__"',
        'method = "failure"',
        f"{_ENDS}test_the_owner_is_told_once_and_in_milliseconds_and_brings_the_rank_back",
        "not within",
    ),
    replaced(
        "actors/hosting.py",
        "            traceback.print_exc()\n        self.runtime.tell_owner(self.owner, failure)\n",
        "            traceback.print_exc()\n",
        f"{_ENDS}test_what_the_owner_does_not_handle_climbs",
        "not within",
    ),
    replaced(
        "actors/far_host.py",
        "                if on_lost is not None:\n                    on_lost(some, reason)\n",
        "                pass\n",
        f"{_HOSTS}test_a_lost_host_is_one_report_that_names_it_and_the_end_of_all_that_ran_there",
        "not within",
    ),
    replaced(
        "actors/host_server.py",
        "        if procs:\n            self.runtime.spawner.kill(procs)\n",
        "        del procs\n",
        f"{_HOSTS}test_an_actor_owns_what_it_has_spawned_on_another_host",
        "what a dead owner had there is gone",
    ),
    replaced(
        "actors/host_server.py",
        "                return words, certificate == LEFT\n",
        "                pass\n",
        f"{_HOSTS}test_nothing_on_other_hosts_outlives_the_program[kill]",
        "all are gone",
    ),
    replaced(
        "actors/attach.py",
        "        _ = runtime.spawner\n",
        "",
        f"{_HOSTS}test_nothing_on_other_hosts_outlives_the_program[kill]",
        "the folders of sockets are gone",
    ),
    replaced(
        "actors/host_server.py",
        '        self._tell(owner, "dead", token, proc.pid or 0, proc.status, proc.lines)\n',
        "",
        f"{_HOSTS}test_a_dead_rank_of_another_host_is_told_and_comes_back_in_its_place",
        "trainer[1] is dead: the process",
    ),
    replaced(
        "actors/strays.py",
        "        self._grace_s = _SETTLED_S\n",
        "",
        f"{_CARE}test_an_actor_that_was_not_made_again_is_missed_at_once",
        "no second is waited",
    ),
    left_out(
        "break_is_loss",
        "test_actors_lines.py::"
        "test_a_connection_that_is_reset_again_and_again_loses_nothing_and_is_no_failure",
        "echo[0] is dead: ",
    ),
    left_out(
        "resend_nothing",
        "test_actors_lines.py::"
        "test_a_connection_that_is_reset_again_and_again_loses_nothing_and_is_no_failure",
        "a message or its answer is missing",
    ),
    replaced(
        "actors/far_host.py",
        "                if on_lost is not None:\n                    on_lost(some, reason)\n",
        "                pass\n",
        "test_actors_lines.py::"
        "test_a_host_that_does_not_come_back_is_one_report_and_ends_what_ran_there[nobody]",
        "not within",
    ),
    replaced(
        "actors/host_server.py",
        "        if procs:\n            self.runtime.spawner.kill(procs)\n",
        "        del procs\n",
        f"{_TREES}test_with_an_owner_ends_all_that_it_has_spawned_and_what_that_has[0]",
        "all levels below it are gone",
    ),
    replaced(
        "actors/hosting.py",
        "            traceback.print_exc()\n        self.runtime.tell_owner(self.owner, failure)\n",
        "            traceback.print_exc()\n",
        f"{_TREES}test_the_end_of_a_leaf_climbs_level_by_level_to_the_program_and_is_told_once",
        "not within",
    ),
    replaced(
        "actors/far_host.py",
        "            self.lost(body if kind < 0 else",
        "            (body if kind < 0 else",
        f"{_TREES}test_a_host_that_is_lost_ends_the_levels_on_it_and_those_below_them",
        "not within",
    ),
    replaced(
        "actors/attached.py",
        "                proc.place = self._reached(*where)\n",
        "                pass\n",
        f"{_PLACES}test_an_actor_brings_back_what_it_had_on_a_lost_host_and_the_program_says_where[third]",
        "no process can be started on local-1",
    ),
    replaced(
        "actors/places.py",
        "            self._attached.replace(lost, found[0])\n",
        "",
        f"{_PLACES}test_a_place_is_taken_once_and_lost_again_with_the_host_that_has_it",
        "'local-0' != 'local-2'",
    ),
    replaced(
        "actors/owned.py",
        '        self.runtime.node.hang_up(proc.address, "the process has ended")\n',
        "",
        f"{_HOSTS}test_a_broadcast_to_a_dead_process_of_another_host_raises",
        "DID NOT RAISE",
    ),
    replaced(
        "actors/places.py",
        "            self._door.gateway.place(lost.folder, found[0].folder)\n",
        "",
        f"{_PLACES}test_ranks_of_a_lost_host_come_back_on_one_that_has_room_and_every_handle_works_again",
        "is lost",
    ),
    replaced(
        "actors/places.py",
        "            loads[loads.index(least)] = (least[0] + 1, *least[1:])\n",
        "",
        f"{_PLACES}test_ranks_of_a_lost_host_are_spread_over_all_that_have_room_and_fail_each_with_its_own",
        "one on each",
    ),
    replaced(
        "actors/folding.py",
        "            if number in self._over:\n                return\n",
        "",
        f"{_FOLDS}test_a_rank_that_fails_ends_a_reduction_at_once_and_nothing_of_it_is_left",
        "all is forgotten",
    ),
    replaced(
        "actors/folding.py",
        "        if folder != here and len(positions) > 1:\n",
        "        if folder == here:\n",
        f"{_FOLDS}test_answers_are_combined_on_each_host_in_the_order_of_ranks_and_one_value_of_each_comes_back",
        "one value of each host",
    ),
    replaced(
        "actors/reference.py",
        "            making.ask(request, rank)\n",
        "            pass\n",
        f"{_ENDS}test_a_result_that_went_with_its_process_fails_whoever_is_given_it_at_once_and_says_which_rank",
        "gave no answer within",
    ),
    replaced(
        "actors/host_server.py",
        "[] if spares is None else spares.take(len(procs))",
        "[]",
        f"{_PLACES}test_one_that_stands_by_on_another_host_takes_the_place_there",
        "it was there before",
    ),
    replaced(
        "actors/owned.py",
        "            wanted = {one for rank in ranks for one in self.policy.ranks(rank, len(self.procs))}\n",
        "            wanted = set(self.policy.ranks(ranks[0], len(self.procs)))\n",
        f"{_PLACES}test_a_policy_brings_all_ranks_of_a_lost_host_back",
        "all are replaced",
    ),
    replaced(
        "actors/zygote.py",
        "            shutil.rmtree(self.folder, ignore_errors=True)\n",
        "            del shutil\n",
        "test_actors_endings.py::test_nothing_outlives_the_program[kill]",
        "the folder of sockets is gone",
    ),
    replaced(
        "actors/proc_mesh.py",
        "        late.start()\n",
        "",
        "test_actors_endings.py::test_a_process_that_does_not_answer_is_killed_when_it_is_stopped",
        "procs.stop gave no answer",
    ),
    replaced(
        "actors/owned.py",
        "(when >= since or self.procs[rank].ended.is_set())",
        "when",
        "test_actors_supervision.py::test_each_of_two_deaths_in_one_place_is_told_to_those_whose_calls_it_has_cut_off",
        "Regex pattern did not match",
    ),
]
