"""A group on two hosts, of the policy alone: its parts begin together, end together, and share one budget."""

from __future__ import annotations

import dataclasses

import pytest

from sky_monarch.controller import model
from sky_monarch.controller.memory import _plain, _state
from sky_monarch.controller.model import GroupPhase, HostPhase, PartPhase, RunPhase, Snapshot
from sky_monarch.controller.spans import places_of
from tests.support.host_policies import LIMITS, HostRun

WIDE = dataclasses.replace(
    LIMITS, replicas=2, min_replicas=1, ranks_per_replica=2, max_restarts=2, backoff_s=1.0
)
HOSTS = {"h0": (0,), "h1": (0,), "h2": (1,), "h3": (1,)}
STORE = "10.0.0.1:29400"
S = 1_000_000_000


class WideRun(HostRun):
    """Two groups of two ranks on two hosts each."""

    def __init__(self) -> None:
        super().__init__(WIDE, hosts=HOSTS)
        self.now_s = 0.0

    @property
    def group(self) -> model.Group:
        """The first one."""
        return self.state.groups[0]

    def phases(self) -> list[PartPhase]:
        """Of its parts."""
        assert self.group.span is not None
        return [part.phase for part in self.group.span.parts]

    def orders(self, actions: list[model.Action]) -> list[tuple[str, str, int]]:
        """What agents are told about the first group: what, where, which generation."""
        names = {model.StartGroup: "start", model.EndGeneration: "end", model.StopGroup: "stop"}
        return [
            (names[type(action)], action.host, getattr(action, "generation", 0))
            for action in actions
            if isinstance(action, model.StartGroup | model.EndGeneration | model.StopGroup)
            and action.replica == 0
        ]

    def said(
        self, host: str, what: type, generation: int | None = None, **more
    ) -> list[tuple[str, str, int]]:
        """The agent of a host says something of the first group."""
        if what in (model.GenerationStarted, model.GenerationEnded, model.GroupStopped):
            more["mono_ns"] = round(self.now_s * S)
        generation = self.group.generation if generation is None else generation
        return self.orders(self.feed(what(replica=0, generation=generation, host=host, **more)))

    def started(self, *, generation: int = 1) -> None:
        """Both parts of a generation run and commit."""
        assert self.group.generation == generation
        assert self.said("h0", model.GenerationStarted, store=STORE) == [("start", "h1", generation)]
        self.said("h1", model.GenerationStarted)
        for rank, host in enumerate(("h0", "h1")):
            self.said(host, model.RankSpawned, rank=rank)
        self.said("h1", model.FirstCommit)

    def killed(self, host: str = "h1") -> list[tuple[str, str, int]]:
        """A rank there is killed."""
        return self.said(host, model.RankExited, rank=int(host == "h1"), failure="rank was killed")

    def ended(self, host: str, **more) -> list[tuple[str, str, int]]:
        """Nothing of the newest generation is left there."""
        return self.said(host, model.GenerationEnded, reason="rank was killed", **more)


@pytest.fixture
def run() -> WideRun:
    """Both groups are up."""
    run = WideRun()
    for host in HOSTS:
        run.connect(host)
    run.started()
    return run


def test_a_group_starts_when_all_its_hosts_are_there_and_the_others_are_told_where_its_store_is() -> None:
    run = WideRun()

    assert run.orders(run.connect("h1")) == [], "one host is not enough"
    assert run.orders(run.connect("h0")) == [("start", "h0", 1)], "first where the store is served"
    actions = run.feed(model.GenerationStarted(replica=0, generation=1, host="h0", store=STORE))
    (order,) = (action for action in actions if isinstance(action, model.StartGroup))
    assert (order.host, order.generation, order.store) == ("h1", 1, STORE)
    assert run.said("h0", model.GenerationStarted, store="10.0.0.1:1") == [], "once"


def test_a_death_ends_the_generation_on_all_hosts_and_the_next_begins_when_nothing_is_left(
    run: WideRun,
) -> None:
    assert run.killed("h1") == [("end", "h0", 1)], "the other host is told at once"
    assert run.ended("h1") == [], "I1: its other part may live"
    assert run.ended("h0") == [("start", "h0", 2)]
    assert run.group.phase is GroupPhase.STARTING
    run.started(generation=2)
    assert run.group.phase is GroupPhase.RUNNING
    assert len(run.group.restarts_ns) == 1, "one death, one restart, on however many hosts"


def test_the_budget_is_the_groups_and_what_is_given_up_is_ended_everywhere(run: WideRun) -> None:
    for generation in (1, 2):
        run.now_s += 1
        run.killed(("h0", "h1")[generation % 2])
        run.ended("h0")
        run.ended("h1")
        run.started(generation=generation + 1)
    run.killed("h0")
    run.ended("h1")
    run.actions.clear()

    assert run.ended("h0") == [("stop", "h0", 0), ("stop", "h1", 0)], "standbys end, too"
    assert run.group.phase is GroupPhase.GIVEN_UP
    assert any(isinstance(action, model.GiveUpGroup) for action in run.actions)
    assert run.connect("h0", Snapshot(replica=0, generation=3, state=GroupPhase.STOPPED, live=frozenset()))
    assert run.group.phase is GroupPhase.GIVEN_UP, "I5"


NEVER_RAN = "exit code 127: bash: line 1: trian: command not found"


def test_a_command_that_never_runs_is_given_up_after_three_tries_whatever_is_left_of_the_budget(
    run: WideRun,
) -> None:
    run.limits = dataclasses.replace(WIDE, max_restarts=9, backoff_s=0.0)
    run.killed("h1")
    run.ended("h0")
    run.ended("h1")  # this one ran
    for generation in (2, 3, 4):
        assert run.group.generation == generation
        run.actions.clear()
        run.said("h0", model.RankExited, rank=0, failure="rank 0 exited with code 127")
        run.ended("h0", never_ran=NEVER_RAN)
    assert run.group.phase is GroupPhase.GIVEN_UP
    (given,) = (action for action in run.actions if isinstance(action, model.GiveUpGroup))
    why = f"its command cannot be started, 3 times in a row: {NEVER_RAN}"
    assert run.group.reason == f"replica 0 was given up after 3 restarts: {why}"
    assert given.row() == {
        "replica": 0,
        "generation": 4,
        "restarts": 3,
        "cause": "cannot_start",
        "error": NEVER_RAN,
        "times": 3,
    }


def test_only_tries_in_a_row_that_no_lost_host_has_ended_count_as_vain(run: WideRun) -> None:
    run.limits = dataclasses.replace(WIDE, max_restarts=9, backoff_s=0.0)
    for number in range(6):
        run.said("h0", model.GenerationStarted, store=STORE)
        if number == 4:
            run.feed(model.AgentDisconnected(host="h1"))
            run.report("h1", "ended")
            run.ended("h0", never_ran=NEVER_RAN)
            run.connect("h1")
            continue
        run.ended("h1")
        run.ended("h0", never_ran=None if number == 1 else NEVER_RAN)
    assert run.group.span is not None
    assert (run.group.phase, run.group.span.vain) == (GroupPhase.STARTING, 1)


def test_restarts_without_progress_wait_longer_each_time(run: WideRun) -> None:
    run.limits = dataclasses.replace(WIDE, max_restarts=9)
    run.killed()
    run.ended("h0")
    assert run.ended("h1") == [("start", "h0", 2)], "the first waits for nothing"
    run.ended("h0")
    assert run.phases() == [PartPhase.IDLE, PartPhase.IDLE], "a part that was never ordered needs no end"
    timer = run.actions[-1]
    assert isinstance(timer, model.SetTimer)
    assert (timer.name, timer.delay_s) == ("group:0", 1.0)
    assert run.orders(run.feed(model.TimerFired(name="group:0"))) == [("start", "h0", 3)]


def test_a_lost_host_ends_its_group_elsewhere_costs_no_restart_and_is_replaced_alone(run: WideRun) -> None:
    run.feed(model.AgentDisconnected(host="h1"))
    told = run.orders(run.report("h1", "ended"))

    assert told == [("end", "h0", 1)]
    assert run.wanted() == {"h0": (1, True), "h1": (2, True), "h2": (1, True), "h3": (1, True)}
    assert run.ended("h0") == []
    assert run.group.phase is GroupPhase.PENDING
    assert run.orders(run.connect("h1")) == [("start", "h0", 2)]
    assert run.group.restarts_ns == ()
    lost = [action for action in run.actions if isinstance(action, model.HostLost)]
    assert [(action.host, action.groups) for action in lost] == [("h1", ((0, 1),))]


def test_a_death_that_a_lost_host_has_caused_elsewhere_costs_no_restart_either(run: WideRun) -> None:
    run.killed("h0")
    run.ended("h0")
    assert run.group.generation == 1, "I1: nobody knows what lives on the other host"
    run.report("h1", "ended")

    assert run.group.restarts_ns == ()
    assert run.orders(run.connect("h1")) == [("start", "h0", 2)]


def test_the_silence_of_a_host_ends_its_group_elsewhere_long_before_it_counts_as_lost(run: WideRun) -> None:
    actions = run.feed(model.AgentDisconnected(host="h1"))
    delays = {action.name: action.delay_s for action in actions if isinstance(action, model.SetTimer)}
    doubted = {"doubt:h1": WIDE.agent_doubted_s}
    assert delays == {"part:h1": WIDE.part_silent_s, "agent:h1": WIDE.agent_lost_s, **doubted}
    assert run.group.phase is GroupPhase.RUNNING

    assert run.orders(run.feed(model.TimerFired(name="part:h1"))) == [("end", "h0", 1)]
    assert run.host("h1").attempt == 1, "it may come back"
    run.ended("h0")
    seen = Snapshot(replica=0, generation=1, state=GroupPhase.RUNNING, live=frozenset({1}))
    back = run.orders(run.connect("h1", seen, incarnation=run.host("h1").incarnation))
    assert back == [("end", "h1", 1)], "I1: what it has is ended first"
    assert run.ended("h1") == [("start", "h0", 2)]


def test_a_host_on_which_a_generation_does_not_end_is_replaced(run: WideRun) -> None:
    run.killed("h0")
    run.ended("h0")

    actions = run.feed(model.TimerFired(name="end:0"))
    (fence,) = (action for action in actions if isinstance(action, model.Fence))
    assert fence.host == "h1"
    assert "did not end" in fence.reason
    assert (run.host("h0").attempt, run.host("h1").attempt) == (1, 2)
    assert run.orders(run.connect("h1")) == [("start", "h0", 2)]
    assert run.feed(model.TimerFired(name="end:0")) == [], "once"


def test_a_blink_of_the_line_to_a_host_ends_nothing(run: WideRun) -> None:
    run.feed(model.AgentDisconnected(host="h1"))
    seen = Snapshot(replica=0, generation=1, state=GroupPhase.RUNNING, live=frozenset({1}))

    actions = run.connect("h1", seen, incarnation=run.host("h1").incarnation)
    assert run.orders(actions) == []
    assert model.CancelTimer(name="part:h1") in actions
    assert run.orders(run.feed(model.TimerFired(name="part:h1"))) == [], "nor does a timer that came too late"


def test_a_new_controller_gives_agents_more_time_to_dial(run: WideRun) -> None:
    actions = run.feed(model.ControllerStarted())

    delays = {action.name: action.delay_s for action in actions if isinstance(action, model.SetTimer)}
    assert delays["part:h1"] == 3 * WIDE.part_silent_s < delays["agent:h1"]


def test_an_order_that_did_not_arrive_is_given_again_and_an_agent_that_restarted_ends_its_group() -> None:
    run = WideRun()
    run.connect("h0")
    run.connect("h1")
    run.feed(model.AgentDisconnected(host="h0"))
    assert run.orders(run.connect("h0", incarnation=run.host("h0").incarnation)) == [("start", "h0", 1)]
    run.started()
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.orders(run.connect("h1")) == [("end", "h0", 1)], "all of its ranks died with it"
    assert run.ended("h0") == [("start", "h0", 2)]


def test_a_host_that_is_leaving_takes_its_group_along_in_order_and_for_nothing(run: WideRun) -> None:
    told = run.orders(run.feed(model.HostLeaving(host="h1", reason="spot")))

    assert ("stop", "h0", 0) in told, "the other part finishes its step, and leaves the quorum with it"
    for host in ("h0", "h1"):
        run.said(host, model.GenerationEnded, reason="it was stopped", stopped=True)
        assert run.said(host, model.GroupStopped) == []
    assert not run.group.phase.final
    run.feed(model.AgentDisconnected(host="h1"))
    assert run.host("h1").attempt == 2
    assert run.orders(run.connect("h1")) == [("start", "h0", 2)]
    assert run.group.restarts_ns == ()


def test_a_group_is_done_when_all_its_parts_are_and_a_death_before_that_takes_the_done_one_along(
    run: WideRun,
) -> None:
    run.said("h0", model.GroupDone, step=100)
    assert run.group.phase is GroupPhase.RUNNING
    assert run.killed("h1") == [("end", "h0", 1)], "it has to do the rest again"
    run.ended("h0")
    run.ended("h1")
    run.started(generation=2)
    run.said("h1", model.GroupDone, step=100)
    run.said("h0", model.GroupDone, step=99)
    assert (run.group.phase, run.group.step) == (GroupPhase.DONE, 100)


def test_down_stops_all_parts_and_waits_for_each(run: WideRun) -> None:
    told = run.orders(run.feed(model.DownRequested(grace_s=1.0, reason="enough")))
    assert told == [("stop", "h0", 0), ("stop", "h1", 0)]
    run.said("h0", model.GroupStopped)
    assert run.group.phase is GroupPhase.STOPPING
    run.said("h1", model.GroupStopped)
    assert run.group.phase is GroupPhase.STOPPED
    assert run.state.phase is RunPhase.STOPPING


def test_the_other_hosts_of_a_group_that_was_given_up_are_taken_down_once_nothing_runs_there(
    run: WideRun,
) -> None:
    run.report("h1", "ended")
    run.report("h1", "failed", kind="refused", reason="quota")
    run.timer("empty:h0")
    assert run.wanted()["h0"] == (1, True), "its part has not ended yet"
    run.said("h0", model.RankExited, rank=0, failure=None)
    run.said("h0", model.GroupStopped)
    gone = run.timer("empty:h0")
    assert [one.host for one in gone if isinstance(one, model.Shutdown)] == ["h0"]
    assert {name: up for name, (_, up) in run.wanted().items()} == {
        "h0": False,
        "h1": False,
        "h2": True,
        "h3": True,
    }
    assert run.state.phase is RunPhase.DEGRADED


def test_a_host_that_cannot_be_had_gives_its_group_up_and_ends_the_rest_of_it(run: WideRun) -> None:
    run.report("h1", "ended")
    told = run.orders(run.report("h1", "failed", kind="refused", reason="quota"))

    assert run.host("h1").phase is HostPhase.GIVEN_UP
    assert run.group.phase is GroupPhase.GIVEN_UP
    assert ("stop", "h0", 0) in told
    assert run.state.phase is RunPhase.DEGRADED, "the other group goes on"


def test_what_began_before_the_journal_was_lost_is_ended_and_begun_anew() -> None:
    run = WideRun()
    run.feed(model.JournalLost(reason="gone"))
    seen = Snapshot(replica=0, generation=4, state=GroupPhase.RUNNING, live=frozenset({0}))

    assert run.orders(run.connect("h0", seen, attempt=1)) == [("end", "h0", 4)]
    run.ended("h0")
    other = dataclasses.replace(seen, live=frozenset({1}))
    assert run.orders(run.connect("h1", other, attempt=1)) == [("end", "h1", 4)]
    assert run.ended("h1") == [("start", "h0", 5)], "no number is given twice"


def test_late_words_of_an_older_generation_change_nothing(run: WideRun) -> None:
    run.killed()
    run.ended("h1")
    run.killed()
    assert run.phases()[1] is PartPhase.IDLE, "what is said twice does not bring it back"
    run.ended("h0")
    before = run.state
    for event in (
        model.GenerationStarted(replica=0, generation=1, host="h0", store="10.0.0.1:1"),
        model.RankExited(replica=0, generation=1, host="h1", rank=1, failure="killed"),
        model.GenerationEnded(replica=0, generation=1, host="h0", reason="killed"),
        model.GroupStopped(replica=0, generation=0, host="h0"),
        model.GroupDone(replica=0, generation=1, host="h0", step=7),
    ):
        run.feed(event)
    assert run.state == before


def test_a_summary_keeps_every_part(run: WideRun) -> None:
    run.killed()

    assert _state(_plain(run.state)) == run.state


@pytest.mark.parametrize(
    ("hosts", "ranks", "why"),
    [
        ({"a": (0,), "b": (0, 1)}, 2, "shares one of its hosts"),
        ({"a": (0,), "b": (0,)}, 3, "3 ranks"),
        ({"a": (0,), "b": (0,)}, 1, "1 ranks"),
    ],
)
def test_hosts_that_cannot_share_a_group_are_refused(hosts, ranks: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        places_of(hosts, ranks=ranks)
    with pytest.raises(ValueError, match="provisioned"):
        model.initial_state({"a": (0,), "b": (0,)}, setup=False, ranks=2)
