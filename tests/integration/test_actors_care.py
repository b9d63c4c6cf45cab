"""What helps whoever runs a program of actors: refusals where the mistake is, logs, stacks, breakpoints."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sky_monarch.actor import SupervisionError, local_hosts, shutdown, this_host, this_proc
from sky_monarch.actors.actor_mesh import ActorMesh
from sky_monarch.actors.runtime import runtime
from sky_monarch.errors import ConfigError
from tests.support.care_actors import Debugged, Planter, Strict, Stuck, Talker, Waiting
from tests.support.processes import parent_of
from tests.support.waiting import PATIENCE, eventually

LIMIT_S = 20
REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def procs():
    mesh = this_host().spawn_procs({"gpus": 2}, name="workers")
    yield mesh
    shutdown()


def test_wrong_arguments_are_refused_where_the_call_is(procs):
    strict = procs.spawn("strict", Strict)
    one = strict.slice(gpus=0)

    plain = one.plain
    for call in (plain.call, plain.call_one, plain.choose, plain.stream, plain.broadcast, plain.rref):
        signature = r"plain\(n: 'int', scale: 'float' = 1.0\)"
        with pytest.raises(TypeError, match=rf"{signature}.*: missing a required argument: 'n'"):
            call()
        with pytest.raises(TypeError, match="too many positional arguments"):
            call(1, 2, 3)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'nam'"):
        one.keyword.call_one(name="x", nam="x")
    with pytest.raises(TypeError, match="too many positional arguments"):
        one.keyword.call_one("x")
    assert one.keyword.call_one(name="x").get(LIMIT_S) == "x"
    assert one.plain.call_one(2, scale=2.0).get(LIMIT_S) == 4.0
    assert one.anything.call_one(1, 2, three=3).get(LIMIT_S) == 6


def nobody_at(procs, cls=Strict, spawner=""):
    """A handle to actors that were never spawned, as another process may have kept one."""
    at, region = procs._addresses, procs._region
    return ActorMesh("gone", cls, next(_numbers), at, region, region, spawner or runtime().address)


_numbers = itertools.count(12345)


def test_a_call_to_an_actor_that_a_process_does_not_have_fails_instead_of_waiting(procs):
    for mesh in (nobody_at(procs), nobody_at(this_proc())):
        with pytest.raises(
            SupervisionError, match=r"gone\[\d\] has failed: .*there is no such actor in this process"
        ):
            mesh.plain.call(1).get(LIMIT_S)
        with pytest.raises(SupervisionError):
            mesh.plain.call(1).get(LIMIT_S)


def took_to_miss(meshes):
    took_s = []
    for one in meshes:
        began = time.monotonic()
        with pytest.raises(SupervisionError, match="there is no such actor in this process"):
            one.say.call("gone").get(LIMIT_S)
        took_s.append(time.monotonic() - began)
    return took_s


def test_who_has_spawned_an_actor_is_asked_whether_it_comes_so_none_that_does_not_is_waited_for(procs):
    # Of three, one may be held up on a machine that is busy.
    for where in (procs, this_proc()):
        assert min(took_to_miss(nobody_at(where, Talker) for _ in range(3))) < 0.5, "its spawner is asked"
    with this_host().spawn_procs(name="elsewhere") as elsewhere:
        planter = elsewhere.spawn("planter", Planter)
        address = planter._addresses[0]
        assert min(took_to_miss(nobody_at(procs, Talker, address) for _ in range(3))) < 0.5
    assert min(took_to_miss(nobody_at(procs, Talker, address) for _ in range(3))) < 0.5, (
        "a dead one sends none"
    )


def test_a_spawn_that_is_late_is_waited_for_as_long_as_its_spawner_lives(tmp_path):
    procs = this_host().spawn_procs(name="late")
    procs.spawn("there", Talker).initialized.get(LIMIT_S)
    planter = local_hosts(1).spawn_procs(name="far").spawn("planter", Planter)
    server = parent_of(parent_of(planter.pid.call_one().get(LIMIT_S)))
    planting = planter.plant_when.call_one(procs, str(tmp_path / "go"), str(tmp_path / "handle"))
    eventually((tmp_path / "go.ready").exists)

    os.kill(server, signal.SIGSTOP)  # what the planter says stays in its host's gateway
    try:
        (tmp_path / "go").touch()
        eventually((tmp_path / "handle").exists)
        planted = pickle.loads((tmp_path / "handle").read_bytes())
        answer = planted.say.call_one("in time")
        with pytest.raises(TimeoutError):
            answer.get(2.0)
    finally:
        os.kill(server, signal.SIGCONT)
    answer.get(LIMIT_S)
    planting.get(LIMIT_S)


def test_an_actor_that_was_not_made_again_is_missed_at_once(procs):
    elsewhere = this_host().spawn_procs(name="elsewhere").spawn("planter", Planter)
    planted = [elsewhere.plant.call_one(procs).get(LIMIT_S) for _ in range(3)]
    handles = [one.slice(gpus=0) for one in planted]
    for one in (*planted, *handles):
        one.say.call("here").get(LIMIT_S)

    procs.respawn(0)

    # These have said before who has spawned the actor, and say it no more.
    took_s = took_to_miss(handles)
    # One of them may be held up on a machine that is busy, not each.
    assert min(took_s) < 0.9, "no second is waited for what cannot come"
    for one in planted:
        one.slice(gpus=1).say.call_one("here").get(LIMIT_S)


def test_each_line_says_which_rank_of_which_mesh_has_printed_it(procs, shown):
    talker = procs.spawn("talker", Talker)
    talker.say.call("hello from {rank}").get(LIMIT_S)
    talker.slice(gpus=1).complain.call_one("on stderr").get(LIMIT_S)

    wanted = {"[workers[0]] hello from 0", "[workers[1]] hello from 1", "[workers[1]] on stderr"}
    eventually(lambda: wanted <= set(shown.text.splitlines()), what="all lines are here")


def test_similar_lines_are_shown_once_in_a_window_with_their_number(shown):
    with this_host().spawn_procs({"gpus": 2}, name="chatty") as procs:
        procs.logging_option(aggregate_window_sec=0.5).get()
        talker = procs.spawn("talker", Talker)
        talker.say.call("step {number} of rank {rank}", 4).get(LIMIT_S)
        talker.slice(gpus=0).say.call_one("another").get(LIMIT_S)
        pattern = re.compile(
            r"^\[chatty\[\d\]\] (?:\[(\d+) similar lines\] )?step \d of rank \d$", re.MULTILINE
        )

        def counts():
            return [int(count or 1) for count in pattern.findall(shown.text)]

        eventually(lambda: sum(counts()) == 8, what="each line is counted, in whichever window it came")
        assert len(counts()) < 8, shown.text
        eventually(lambda: re.search(r"^\[chatty\[\d\]\] another$", shown.text, re.MULTILINE))
        procs.logging_option(stream_to_client=False, aggregate_window_sec=None)
        talker.say.call("nobody hears this").get(LIMIT_S)
        with pytest.raises(ConfigError, match="aggregate_window_sec"):
            procs.logging_option(aggregate_window_sec=0)
    assert "nobody hears" not in shown.text


def test_a_wait_that_is_over_says_what_the_actors_are_doing(procs, tmp_path):
    stuck = procs.spawn("stuck", Stuck)
    call = stuck.stay_in_here.call(str(tmp_path / "go"), rank=1)

    def words_of(future):
        with pytest.raises(TimeoutError) as raised:
            future.get(1.0)
        return str(raised.value)

    def told():
        words = words_of(call)
        assert re.search(
            r"within 1.0 s; stuck\[1\] \(pid \d+ on \S+\) is at .*care_actors\.py:\d+ in stay_in_here", words
        ), words
        assert "stuck[0]" not in words, "it has answered"
        assert "time.sleep(0.05)" in words, words
        return True

    eventually(told, what="what the one is doing that has not answered")

    waiting = procs.slice(gpus=0).spawn("waiting", Waiting)
    late = waiting.wait_in_here.call_one(300)
    deeper = r"care_actors\.py:\d+ in _deeper: await asyncio\.sleep\(s\) \(called at "
    eventually(lambda: re.search(deeper, words_of(late)), what="where the coroutine is")
    late.cancel()
    (tmp_path / "go").touch()
    call.get(LIMIT_S)


@pytest.mark.slow
def test_the_stacks_of_a_process_are_told_even_where_it_holds_pythons_lock(procs, tmp_path):
    stuck = procs.spawn("stuck", Stuck)
    stays = stuck.slice(gpus=0).stay_in_here.call_one(str(tmp_path / "go"))
    told = eventually(
        lambda: (text := procs.stacks(0)) and "in stay_in_here" in text and text, what="it is there"
    )
    assert "thread actor-stuck:" in told
    (tmp_path / "go").touch()
    stays.get(LIMIT_S)

    held = stuck.slice(gpus=1).hold_the_lock.call_one(2 * LIMIT_S)  # the signal ends it
    text = eventually(
        lambda: (text := stuck.stacks(1, timeout=2.0)) and "(by signal)" in text and text,
        what="it holds the lock",
    )
    assert "in hold_the_lock" in text
    held.get(3 * LIMIT_S)
    pid = procs.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(SupervisionError, match="says nothing within"):
            procs.stacks(1, timeout=0.4)
    finally:
        os.kill(pid, signal.SIGCONT)


def attach(path: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sky_monarch", "debug", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)])),
        },
    )


def test_a_breakpoint_is_passed_over_unless_enabled_and_waits_no_longer_than_it_may(procs, shown):
    debugged = procs.slice(gpus=0).spawn("debugged", Debugged)
    assert debugged.stop_here.call_one(7).get(LIMIT_S) == 7
    procs.debug_option(wait_s=0.2)
    assert debugged.stop_here.call_one(8).get(LIMIT_S) == 8
    procs.debug_option(wait_s=None)
    assert debugged.stop_here.call_one(9).get(LIMIT_S) == 9
    eventually(lambda: shown.text.count("was passed over") == 2, what="passed over before and after")
    eventually(lambda: "nobody came within 0.2 s; it goes on" in shown.text, what="waited for, once")
    with pytest.raises(ConfigError, match="wait_s is -1"):
        procs.debug_option(wait_s=-1)


def test_a_breakpoint_of_an_actor_is_reached_from_another_terminal(procs, shown):
    procs.logging_option(stream_to_client=False, aggregate_window_sec=None)
    procs.debug_option(wait_s=60)
    debugged = procs.slice(gpus=1).spawn("debugged", Debugged)
    call = debugged.stop_here.call_one(7)
    try:
        line = (
            r"\[workers\[1\]\] breakpoint at \S+care_actors\.py:\d+ in workers\[1\] .*sky-monarch debug (\S+)"
        )
        pattern = re.compile(line)
        path = eventually(lambda: pattern.search(shown.text), what="how to attach is shown")[1]
        assert Path(path).stat().st_mode & 0o777 == 0o600
        terminal = attach(path)
        out, _ = terminal.communicate("p secret * 6\nfound = 41\ncontinue\n", timeout=LIMIT_S * PATIENCE)
        assert terminal.returncode == 0
        assert "(Pdb) 42" in out
        assert call.get(LIMIT_S) == 41, "the code goes on with what was changed"
        assert not Path(path).exists()
    finally:
        procs.debug_option(wait_s=None)
        procs.logging_option(aggregate_window_sec=None)


@pytest.mark.slow
def test_whoever_leaves_the_debugger_lets_the_code_go_on(procs, shown):
    procs.debug_option(wait_s=60)
    call = procs.slice(gpus=0).spawn("debugged", Debugged).stop_here.call_one(5)
    try:
        path = eventually(lambda: re.search(r"sky-monarch debug (\S+)", shown.text))[1]
        terminal = attach(path)
        terminal.communicate("p secret\n", timeout=LIMIT_S * PATIENCE)
        assert call.get(LIMIT_S) == 5
    finally:
        procs.debug_option(wait_s=None)
