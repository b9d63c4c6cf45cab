"""The same for the processes of the actor API."""

from __future__ import annotations

from tests.support.mutant import replaced

_ENDS = "test_actors_supervision.py::"
_HOSTS = "test_actors_hosts.py::"
_STANDBY = "test_actors_standby.py::"
_AGAIN = "        self._make_again(ranks, end)\n"

ACTORS = [
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
        "            self.respawn(self.policy.ranks(rank, len(self.procs)), 60.0, ended=(rank, proc))\n",
        "            pass\n",
        f"{_ENDS}test_a_policy_replaces[one_for_one-replaced0]",
        "not within",
    ),
    replaced(
        "actors/owned.py",
        "                if rank in ranks\n",
        "                if rank in ranks[:1]\n",
        f"{_STANDBY}test_several_ranks_are_replaced_at_once_and_their_actors_made_side_by_side",
        "gave no answer within",
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
        "start(fresh, spares)",
        "start(fresh)",
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
        '            elif kind == "lost" and folder == self.client:\n                return words\n',
        "",
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
        "actors/zygote.py",
        "            shutil.rmtree(self.folder, ignore_errors=True)\n",
        "            del shutil\n",
        "test_actors_endings.py::test_nothing_outlives_the_program[kill]",
        "the folder of sockets is gone",
    ),
]
