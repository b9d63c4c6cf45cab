"""A run of the policy alone: events in, actions out."""

from __future__ import annotations

from sky_monarch.controller import model
from sky_monarch.controller.model import Limits
from sky_monarch.controller.policy import step

LIMITS = Limits(replicas=3, min_replicas=2, ranks_per_replica=1, max_restarts=2, window_s=600.0, grace_s=5.0)
AGENT = 7


class Run:
    """Feeds events in order and keeps what was wanted."""

    def __init__(self, limits: Limits = LIMITS, *, setup: bool = False) -> None:
        self.limits = limits
        self.state = model.initial_state({"local": tuple(range(limits.replicas))}, setup=setup)
        self.actions: list[model.Action] = []
        self.feed(model.ControllerStarted())

    def feed(self, *events: model.Event) -> list[model.Action]:
        new: list[model.Action] = []
        for event in events:
            self.state, actions = step(self.state, event, self.limits)
            new += actions
        self.actions += new
        return new

    def connect(
        self, *groups: model.Snapshot, incarnation: int = AGENT, mono_ns: int = 0
    ) -> list[model.Action]:
        return self.feed(
            model.AgentConnected(host="local", incarnation=incarnation, mono_ns=mono_ns, groups=groups)
        )

    def up(self, *, incarnation: int = AGENT) -> None:
        self.connect(incarnation=incarnation)
        for replica in range(self.limits.replicas):
            self.runs(replica, 1)

    def runs(self, replica: int, generation: int) -> None:
        self.feed(
            model.GenerationStarted(replica=replica, generation=generation),
            model.RankSpawned(replica=replica, rank=0, generation=generation),
            model.FirstCommit(replica=replica, generation=generation),
        )

    def give_up(self, replica: int, *, reason: str = "rank 0 exited with code 7") -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(
            model.RankExited(replica=replica, rank=0, generation=generation, failure=reason),
            model.GenerationEnded(replica=replica, generation=generation, reason=reason),
            model.GroupGivenUp(replica=replica, generation=generation, restarts=2, reason=reason),
        )

    def done(self, replica: int, *, at: int | None = 120, left: bool = True) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        actions = self.feed(model.GroupDone(replica=replica, generation=generation, step=at))
        return actions + (self.leaves(replica) if left else [])

    def leaves(self, replica: int, *, failure: str | None = None) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(model.RankExited(replica=replica, rank=0, generation=generation, failure=failure))

    def stopped(self, replica: int) -> list[model.Action]:
        generation = self.state.groups[replica].generation
        return self.feed(model.GroupStopped(replica=replica, generation=generation))

    def down(self) -> list[model.Action]:
        return self.feed(model.DownRequested(grace_s=3.0, reason="down was called"))


def kinds(actions: list[model.Action], kind: type) -> list:
    return [action for action in actions if isinstance(action, kind)]
