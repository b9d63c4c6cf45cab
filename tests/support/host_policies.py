"""A run on provisioned hosts, of the policy alone: what launcher and agents say goes in, actions come out."""

from __future__ import annotations

from typing import Any

from sky_monarch.controller import model
from sky_monarch.controller.hosts import Host, is_wanted
from sky_monarch.controller.model import FailureKind, HostReported, Limits, StartGroup
from sky_monarch.controller.policy import step
from tests.support.policies import kinds

LIMITS = Limits(
    replicas=3,
    min_replicas=2,
    ranks_per_replica=1,
    max_restarts=2,
    window_s=600.0,
    grace_s=5.0,
)


class HostRun:
    """Three hosts, ``h0`` to ``h2``, with a replica group each, and a head without any."""

    def __init__(
        self, limits: Limits = LIMITS, *, setup: bool = False, hosts: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self.limits = limits
        placed = hosts or {f"h{number}": (number,) for number in range(limits.replicas)}
        ranks = limits.ranks_per_replica
        self.state = model.initial_state(
            {"head": (), **placed}, setup=setup, provisioned=set(placed), ranks=ranks
        )
        self.actions: list[model.Action] = []
        self.incarnations = 0
        self.feed(model.ControllerStarted())
        self.connect("head", attempt=0)
        self.feed(model.LauncherCame())

    def feed(self, *events: model.Event) -> list[model.Action]:
        """Events in order; returns what they lead to."""
        new: list[model.Action] = []
        for event in events:
            self.state, actions = step(self.state, event, self.limits)
            new += actions
        self.actions += new
        return new

    def host(self, name: str) -> Host:
        """A host as the policy knows it."""
        return self.state.host(name)

    def wanted(self) -> dict[str, tuple[int, bool]]:
        """Attempt of each host, and whether a cluster of it is wanted."""
        return {
            host.name: (host.attempt, is_wanted(self.state, host))
            for host in self.state.hosts
            if host.provisioned
        }

    def report(self, host: str, state: str, *, attempt: int | None = None, **more: Any) -> list[model.Action]:
        """The launcher says something of a host; by default of its newest attempt."""
        attempt = self.host(host).attempt if attempt is None else attempt
        if "kind" in more:
            more["kind"] = FailureKind(more["kind"])
        return self.feed(model.HostReport(host=host, attempt=attempt, state=HostReported(state), **more))

    def connect(
        self,
        host: str,
        *groups: model.Snapshot,
        attempt: int | None = None,
        probe: str | None = None,
        incarnation: int | None = None,
        examining: bool = False,
    ) -> list[model.Action]:
        """An agent dials; by default a new one, of the newest attempt."""
        if incarnation is None:
            self.incarnations += 1
            incarnation = self.incarnations
        attempt = self.host(host).attempt if attempt is None else attempt
        return self.feed(
            model.AgentConnected(
                host=host,
                incarnation=incarnation,
                mono_ns=0,
                groups=groups,
                attempt=attempt,
                probe=probe,
                examining=examining,
            )
        )

    def launched(self, host: str, **more: Any) -> list[model.Action]:
        """A host is launched and its agent dials."""
        self.report(host, "launching")
        self.report(host, "launched")
        return self.connect(host, **more)

    def runs(self, replica: int) -> None:
        """A group commits in its newest generation."""
        whose = {"replica": replica, "generation": self.state.groups[replica].generation}
        self.feed(
            model.GenerationStarted(**whose),
            model.RankSpawned(**whose, rank=0),
            model.FirstCommit(**whose),
        )

    def up(self) -> None:
        """All hosts are there and all groups commit."""
        for host in self.state.hosts:
            if host.provisioned:
                self.launched(host.name)
                for replica in host.replicas:
                    self.runs(replica)

    def silent(self, host: str) -> list[model.Action]:
        """The agent of a host is not heard of for as long as that takes."""
        self.feed(model.AgentDisconnected(host=host))
        return self.timer(f"agent:{host}")

    def timer(self, name: str) -> list[model.Action]:
        """A timer fires."""
        return self.feed(model.TimerFired(name=name))

    def down(self) -> list[model.Action]:
        """Somebody wants the end."""
        return self.feed(model.DownRequested(grace_s=3.0, reason="down was called"))

    def stopped(self, replica: int) -> list[model.Action]:
        """A group was stopped on request."""
        generation = self.state.groups[replica].generation
        return self.feed(model.GroupStopped(replica=replica, generation=generation))

    def done(self, replica: int) -> list[model.Action]:
        """A group is done and its rank has left."""
        whose = {"replica": replica, "generation": self.state.groups[replica].generation}
        return self.feed(model.GroupDone(**whose, step=120), model.RankExited(**whose, rank=0, failure=None))


def starts(actions: list[model.Action]) -> list[tuple[str, int, int]]:
    """Who is told to start what: host, replica, generation."""
    return [(start.host, start.replica, start.generation) for start in kinds(actions, StartGroup)]
