"""Steps of a head that is a cluster, and of its launcher, that are left out."""

from __future__ import annotations

from tests.support.mutant import replaced

HEAD = "test_head_cluster.py::"
LAUNCHER = "test_launcher.py::"
LOST = "test_head_lost.py::"

AWAY = [
    replaced(
        "provision/launcher.py",
        "if (reason := provisioner.head_gone) is not None:",
        "if (reason := None) is not None:",
        f"{LAUNCHER}test_one_word_that_the_head_is_gone_proves_nothing_and_two_end_the_run",
        "it has ended",
    ),
    replaced(
        "provision/provisioner.py",
        "self.head_gone = self.head_gone or reason",
        "pass",
        f"{HEAD}test_a_head_that_dies_ends_the_run_and_its_hosts_and_says_so",
        "has not answered for 20 s",
    ),
    replaced(
        "provision/launcher.py",
        "else limits.unreached_s):",
        "else 1e9):",
        f"{LAUNCHER}test_what_cannot_be_taken_down_is_named",
        "it has ended",
    ),
    replaced(
        "provision/launcher.py",
        "controller.collected()",
        "pass",
        f"{LAUNCHER}test_the_end_is_collected_before_the_head_goes",
        "is_set",
    ),
    replaced(
        "provision/launcher.py",
        "clusters = dict.fromkeys(self._recorded(host))",
        "clusters = {host: None}",
        f"{LAUNCHER}test_a_head_that_is_gone_takes_every_attempt_along_and_hosts_that_the_plan_has_not",
        "demo-h0-a2",
    ),
    replaced(
        "launch/door.py",
        'return folder.process("door") is not None and folder.api.exists()',
        "return folder.api.exists()",
        f"{LAUNCHER}test_by_ssh_the_head_answers_at_the_socket_here_and_a_way_that_is_lost_is_opened_again",
        "demo-h1 attempt 1 is launched",
    ),
    replaced(
        "provision/__main__.py",
        "return keep(lambda: _work(settings), lambda: None)",
        "return _work(settings)",
        f"{HEAD}test_a_launcher_that_is_killed_is_kept_and_there_is_only_one",
        "not enough values to unpack",
    ),
    replaced(
        "provision/launcher.py",
        "(why_not := self._succeed(text)) is None:",
        '(why_not := "") is None:',
        f"{LOST}test_a_lost_head_is_had_again_with_hosts_of_its_own_and_who_watches_goes_on",
        "starts it again, from its newest checkpoint",
    ),
    replaced(
        "controller/policy.py",
        "                self._host(name, attempt=attempt + 1)\n",
        "                pass\n",
        f"{LOST}test_a_launcher_that_is_killed_while_it_clears_up_after_a_lost_head_goes_on_with_that",
        "the next head has the run",
    ),
    replaced(
        "provision/launcher.py",
        "left |= dict(zip(names, pool.map(self._take_down, names), strict=True))\n        head = Head(",
        "pass\n        head = Head(",
        f"{LAUNCHER}test_a_head_that_is_gone_is_followed_by_another_one_once_nothing_of_it_is_left",
        "no host of the lost one stood beside it",
    ),
    replaced(
        "provision/launcher.py",
        "if standing:",
        "if not standing:",
        f"{LAUNCHER}test_no_head_follows_where_something_of_the_lost_one_may_still_run",
        "it has ended",
    ),
    replaced(
        "sdk/_up.py",
        "folder.phase() is Phase.LIVE and folder.agent() is None",
        "False",
        f"{HEAD}test_without_its_launcher_a_run_trains_on_and_a_lost_host_waits_for_it",
        "is live",
    ),
    replaced(
        "launch/away.py",
        "begin(folder)  # also where it was killed meanwhile",
        "pass",
        f"{HEAD}test_down_ends_what_has_neither_head_nor_launcher",
        "timed out after",
    ),
    replaced(
        "controller/farewell.py",
        "async with asyncio.timeout(collect_s):",
        "async with asyncio.timeout(0):",
        "test_controller_hosts.py::test_a_head_elsewhere_keeps_the_end_of_its_run_until_that_was_collected",
        "the end is still here alone",
    ),
]
