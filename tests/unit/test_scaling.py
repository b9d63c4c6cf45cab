"""Another number of replica groups: what it changes, what cannot be, and what follows from it event by event."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.model import GroupPhase, HostPhase, RunPhase, StartGroup, StopGroup
from sky_monarch.controller.room import Room, find_room, room_after
from sky_monarch.controller.scale_plan import plan_scale
from sky_monarch.errors import ConfigError
from tests.support.host_policies import HostRun
from tests.support.policies import LIMITS, Run, kinds

ROOM = Room(most=8, reason="this machine has 8 accelerators", fix="give 8 or fewer", stem="job")


def scale(run: Run | HostRun, replicas: int, room: Room = ROOM) -> list[model.Action]:
    plan = plan_scale(run.state, run.limits, replicas, room)
    homes = tuple(plan.homes.items())
    return run.feed(model.Scaled(replicas=replicas, homes=homes, reason="asked")) if plan.is_change else []


def phases(run: Run | HostRun) -> list[GroupPhase]:
    return [group.phase for group in run.state.groups]


def hosts_run(count: int = 3, **changes: int) -> HostRun:
    limits = dataclasses.replace(LIMITS, replicas=count, min_replicas=1, **changes)
    return HostRun(limits, hosts={f"job-h{number}": (number,) for number in range(count)})


def test_new_groups_start_at_once_and_nobody_else_is_touched() -> None:
    run = Run()
    run.up()
    started = kinds(scale(run, 5), StartGroup)
    assert [(one.replica, one.generation, one.max_restarts) for one in started] == [(3, 1, 2), (4, 1, 2)]
    assert run.state.phase is RunPhase.RUNNING
    for replica in (3, 4):
        run.runs(replica, 1)
    assert run.state.phase is RunPhase.RUNNING
    for replica in range(5):
        run.done(replica)
    assert run.state.phase is RunPhase.SUCCEEDED


def test_groups_above_leave_in_order_and_are_not_missed() -> None:
    run = Run()
    run.up()
    stopped = kinds(scale(run, 2), StopGroup)
    assert [(one.replica, one.grace_s) for one in stopped] == [(2, LIMITS.grace_s)]
    assert "scaled to 2" in stopped[0].reason
    run.stopped(2)
    assert run.state.phase is RunPhase.RUNNING, "nobody is missed"
    assert run.state.groups[2].restarts_ns == ()
    assert run.state.notes == ()
    for replica in (0, 1):
        run.done(replica)
    assert run.state.phase is RunPhase.SUCCEEDED


def test_a_group_that_is_wanted_again_while_it_leaves_starts_once_it_has_left() -> None:
    run = Run()
    run.up()
    scale(run, 2)
    assert not kinds(scale(run, 3), StartGroup), "two of its generations would live"
    started = kinds(run.stopped(2), StartGroup)
    assert [(one.replica, one.generation) for one in started] == [(2, 2)]
    assert run.state.phase is RunPhase.RUNNING


def test_a_group_is_recalled_once_its_agent_is_there_to_hear_it() -> None:
    run = Run()
    run.up()
    scale(run, 2)
    run.stopped(2)
    run.feed(model.AgentDisconnected(host="local"))
    assert not kinds(scale(run, 3), StartGroup)
    live = [
        model.Snapshot(replica=one, generation=1, state=GroupPhase.RUNNING, live=frozenset({0}))
        for one in (0, 1)
    ]
    gone = model.Snapshot(replica=2, generation=1, state=GroupPhase.STOPPED, live=frozenset())
    started = kinds(run.connect(*live, gone), StartGroup)
    assert [(one.replica, one.generation) for one in started] == [(2, 2)]


def test_an_agent_that_was_away_is_told_then_to_let_a_group_go() -> None:
    run = Run()
    run.up()
    run.feed(model.AgentDisconnected(host="local"))
    assert not kinds(scale(run, 2), StopGroup), "nobody would hear it"
    live = [
        model.Snapshot(replica=one, generation=1, state=GroupPhase.RUNNING, live=frozenset({0}))
        for one in range(3)
    ]
    assert [one.replica for one in kinds(run.connect(*live), StopGroup)] == [2]


def test_what_was_given_up_stays_so() -> None:
    run = Run()
    run.up()
    run.give_up(2)
    scale(run, 2)
    assert run.state.phase is RunPhase.RUNNING
    plan = plan_scale(run.state, run.limits, 3, ROOM)
    assert plan.start == ()
    assert "replica 2 was given up, which stays so" in plan.notes
    assert not kinds(scale(run, 3), StartGroup)
    assert run.state.groups[2].phase is GroupPhase.GIVEN_UP
    assert run.state.phase is RunPhase.DEGRADED


def test_a_host_is_asked_for_proved_and_its_group_started() -> None:
    run = hosts_run(2)
    run.up()
    wanted = run.state.wanted
    scale(run, 3)
    assert run.wanted() == {"job-h0": (1, True), "job-h1": (1, True), "job-h2": (1, True)}
    assert run.state.wanted > wanted, "a launcher that waits is told"
    assert "host job-h2: attempt 1 is asked for; going on without replica 2" in str(run.state.reason)
    started = kinds(run.launched("job-h2"), StartGroup)
    assert [(one.host, one.replica) for one in started] == [("job-h2", 2)]
    run.runs(2)
    assert run.state.phase is RunPhase.RUNNING


def test_a_host_is_taken_down_when_its_last_group_has_left_and_its_output_is_read() -> None:
    run = hosts_run(3)
    run.up()
    scale(run, 2)
    assert run.wanted()["job-h2"] == (1, True), "its group finishes its step first"
    run.stopped(2)
    assert run.wanted()["job-h2"] == (1, True)
    gone = run.timer("empty:job-h2")
    assert [one.host for one in kinds(gone, model.Shutdown)] == ["job-h2"]
    assert run.wanted()["job-h2"] == (1, False)
    run.feed(model.AgentDisconnected(host="job-h2"))
    run.report("job-h2", "down")
    assert run.host("job-h2").phase is HostPhase.DOWN
    assert run.state.phase is RunPhase.RUNNING
    assert not kinds(run.actions, model.HostLost)


def given_up(run: HostRun, replica: int) -> list[model.Action]:
    generation = run.state.groups[replica].generation
    why = {"restarts": 2, "reason": "it died"}
    return run.feed(model.GroupGivenUp(replica=replica, generation=generation, **why))


def test_a_host_whose_groups_were_all_given_up_is_taken_down_when_their_output_is_read() -> None:
    run = HostRun(
        hosts={"job-h0": (0,), "job-h1": (1, 2)}, limits=dataclasses.replace(LIMITS, min_replicas=1)
    )
    run.up()
    given_up(run, 1)
    run.timer("empty:job-h1")
    assert run.wanted()["job-h1"] == (1, True), "it has another group"
    given_up(run, 2)
    assert run.wanted()["job-h1"] == (1, True), "its output is read"
    gone = run.timer("empty:job-h1")
    assert [(one.host, one.reason) for one in kinds(gone, model.Shutdown)] == [
        ("job-h1", "every group of it was given up")
    ]
    assert run.wanted() == {"job-h0": (1, True), "job-h1": (1, False)}
    run.feed(model.AgentDisconnected(host="job-h1"))
    run.report("job-h1", "down")
    assert run.host("job-h1").gone
    assert run.state.phase is RunPhase.DEGRADED
    run.done(0)
    assert run.state.phase is RunPhase.STOPPING


def test_a_host_whose_group_was_given_up_while_its_agent_was_away_is_taken_down_at_once() -> None:
    run = hosts_run(2)
    run.up()
    run.feed(model.AgentDisconnected(host="job-h1"))
    given_up(run, 1)
    assert run.wanted() == {"job-h0": (1, True), "job-h1": (1, False)}
    assert run.host("job-h1").phase is HostPhase.DOWN


def test_a_host_that_is_being_let_go_stays_where_a_group_is_placed_there() -> None:
    run = hosts_run(2)
    run.up()
    given_up(run, 1)
    assert run.host("job-h1").emptied
    room = dataclasses.replace(ROOM, per_host=2)
    scale(run, 4, room)
    assert run.host("job-h1").replicas == (1, 3)
    run.timer("empty:job-h1")
    assert run.wanted()["job-h1"] == (1, True)
    run.runs(3)
    given_up(run, 3)
    run.timer("empty:job-h1")
    assert run.wanted()["job-h1"] == (1, False), "let go by what came later"


def test_a_host_with_a_group_that_was_given_up_is_had_again_for_one_that_was_not() -> None:
    run = HostRun(
        hosts={"job-h0": (0,), "job-h1": (1, 2)}, limits=dataclasses.replace(LIMITS, min_replicas=1)
    )
    run.up()
    given_up(run, 1)
    scale(run, 2)
    run.stopped(2)
    run.timer("empty:job-h1")
    assert run.wanted()["job-h1"] == (1, False)
    run.feed(model.AgentDisconnected(host="job-h1"))
    run.report("job-h1", "down")
    scale(run, 3)
    assert run.wanted()["job-h1"] == (2, True)
    assert [one.replica for one in kinds(run.launched("job-h1"), StartGroup)] == [2]


def test_a_host_that_was_taken_down_is_had_again_as_its_next_attempt() -> None:
    run = hosts_run(3)
    run.up()
    scale(run, 2)
    run.stopped(2)
    run.timer("empty:job-h2")
    scale(run, 3)
    assert run.wanted()["job-h2"] == (2, True)
    assert run.host("job-h2").replaces == 1, "its old cluster goes first"
    assert not run.host("job-h2").connected, "nothing is started on what is going down"
    started = kinds(run.launched("job-h2"), StartGroup)
    assert [(one.replica, one.generation) for one in started] == [(2, 2)]


def test_a_host_that_is_wanted_again_before_it_was_taken_down_stays() -> None:
    run = hosts_run(3)
    run.up()
    scale(run, 2)
    run.stopped(2)
    started = kinds(scale(run, 3), StartGroup)
    assert [(one.host, one.replica, one.generation) for one in started] == [("job-h2", 2, 2)]
    run.timer("empty:job-h2")
    assert run.wanted()["job-h2"] == (1, True)


def test_no_good_host_is_let_go_while_another_is_awaited() -> None:
    run = hosts_run(3)
    run.up()
    run.silent("job-h0")
    plan = plan_scale(run.state, run.limits, 2, ROOM)
    assert plan.notes == ("replica 2 will leave once replica 0 is there, whose host is awaited",)
    assert not kinds(scale(run, 2), StopGroup), "it trains on in place of the one that is missing"
    assert run.state.groups[2].phase is GroupPhase.RUNNING
    assert kinds(run.launched("job-h0"), StopGroup)[0].replica == 2


def test_a_host_that_was_never_there_is_not_waited_for_any_more() -> None:
    run = hosts_run(2)
    run.up()
    scale(run, 4)
    run.report("job-h3", "launching")
    scale(run, 2)
    assert run.wanted() == {
        "job-h0": (1, True),
        "job-h1": (1, True),
        "job-h2": (1, False),
        "job-h3": (1, False),
    }
    assert run.state.phase is RunPhase.RUNNING


def test_a_host_that_is_lost_while_its_group_leaves_does_not_bring_it_back() -> None:
    run = hosts_run(3)
    run.up()
    scale(run, 2)
    run.silent("job-h2")
    assert run.host("job-h2").phase is HostPhase.DOWN
    assert run.state.groups[2].phase is GroupPhase.STOPPED
    assert run.host("job-h2").attempt == 1, "and is not asked for again"
    assert not kinds(run.actions, model.HostLost), "it was leaving"


def test_groups_fill_the_hosts_that_have_a_place_before_others_are_asked_for() -> None:
    run = HostRun(dataclasses.replace(LIMITS, min_replicas=1), hosts={"job-h0": (0, 1), "job-h1": (2,)})
    run.up()
    plan = plan_scale(run.state, run.limits, 6, dataclasses.replace(ROOM, per_host=2))
    assert plan.homes == {"job-h1": (3,), "job-h2": (4, 5)}
    assert plan.launch == ("job-h2",)
    scale(run, 6, dataclasses.replace(ROOM, per_host=2))
    assert [group.host for group in run.state.groups] == ["job-h0"] * 2 + ["job-h1"] * 2 + ["job-h2"] * 2


def test_what_cannot_be_is_refused_with_what_could() -> None:
    run = Run()
    run.up()
    with pytest.raises(ConfigError, match="fewer than min_replicas, which is 2") as few:
        plan_scale(run.state, run.limits, 1, ROOM)
    assert "give 2 or more" in str(few.value.hint)
    with pytest.raises(ConfigError, match="room for 8 replica groups, not for 9: this machine has 8") as many:
        plan_scale(run.state, run.limits, 9, ROOM)
    assert many.value.hint == "give 8 or fewer"
    scale(run, 5)
    for replica in (3, 4):
        run.runs(replica, 1)
    run.give_up(1)
    with pytest.raises(ConfigError, match="replica 1 cannot go on, so of 2 groups 1 would be left") as lost:
        plan_scale(run.state, run.limits, 2, ROOM)
    assert "give 3 or more" in str(lost.value.hint)
    run.done(0, left=False)
    with pytest.raises(ConfigError, match="is ending: replica 0 has reached the target"):
        plan_scale(run.state, run.limits, 4, ROOM)
    run.down()
    with pytest.raises(ConfigError, match="is ending: down was called"):
        plan_scale(run.state, run.limits, 4, ROOM)


def test_a_group_goes_to_a_new_host_rather_than_to_one_that_was_asked_for_fewer() -> None:
    limits = dataclasses.replace(LIMITS, replicas=3, min_replicas=1)
    run = HostRun(limits, hosts={"job-h0": (0, 1), "job-h1": (2,)})
    run.up()
    room = Room(per_host=2, stem="job")
    assert plan_scale(run.state, run.limits, 4, room).homes == {"job-h1": (3,)}

    sized = dataclasses.replace(room, asked={"job-h0": 2, "job-h1": 1})
    assert plan_scale(run.state, run.limits, 5, sized).homes == {"job-h2": (3, 4)}
    scale(run, 4, sized)
    assert plan_scale(run.state, run.limits, 5, sized).homes == {"job-h2": (4,)}


def test_after_a_job_has_moved_a_host_takes_as_many_groups_as_it_was_asked_for_there() -> None:
    limits = dataclasses.replace(LIMITS, replicas=3, min_replicas=1)
    run = HostRun(limits, hosts={"job-h0": (0, 1), "job-h1": (2,)})
    moved = dataclasses.replace(run.state, placement=1)
    sized = Room(per_host=3, stem="job", asked={"job-h0": 3})

    found = room_after(sized, moved)
    assert [found.on(f"job-h{number}") for number in range(3)] == [2, 1, 2]
    assert room_after(dataclasses.replace(sized, asked={}), moved).on("job-h1") == 2


def test_room_is_what_devices_and_cores_of_this_machine_allow(tmp_path) -> None:
    def room(**changes):
        known = {"devices_per_group": 0, "cpus_per_group": None, "hosts": {"local": (0, 1)}, "base_env": {}}
        job = {"name": "job", "ranks_per_replica": 1}
        return find_room(job, provisioner=tmp_path / "none", **{**known, **changes})

    assert room(devices_per_group=2, base_env={"ROCR_VISIBLE_DEVICES": "0,1,2,3"}).most == 2
    assert "4 accelerators, 2 for each group" in room(devices_per_group=2, devices=lambda _: 4).reason
    assert room(cpus_per_group="1e6+").most == 0
    assert 1 < room().most < room(devices_per_group=2, devices=lambda _: None).most + 1


def test_groups_beyond_the_one_host_of_a_plan_elsewhere_are_refused(tmp_path) -> None:
    path = tmp_path / "provisioner.json"
    path.write_text(
        '{"provider": "skypilot", "choices": [{"reachability": "one host", "accelerator": "MI300X:8", '
        '"gpus_per_group": 4}]}'
    )
    room = find_room(
        {"name": "job"},
        devices_per_group=4,
        cpus_per_group=None,
        hosts={"head": (), "job-h0": (0,)},
        provisioner=path,
        base_env={},
    )
    assert (room.most, room.per_host, room.stem) == (2, 2, "job")
    with pytest.raises(ConfigError, match="all groups on one host"):
        room.require(3)
