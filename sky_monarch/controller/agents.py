"""The accepting side of the channel to the hosts' agents: who is connected, and what each of them says.

Checks everything before anybody else sees it. A peer that says what the protocol does not allow is dropped
with a notice; it can never end the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from sky_monarch.controller.hosts import certificate_name
from sky_monarch.controller.reports import check_hello, check_report
from sky_monarch.errors import ChannelError, ProtocolError

__all__ = ["Agents", "Channel", "Incoming"]

_log = structlog.get_logger()


class Channel(Protocol):
    """What this module needs of ``sky_monarch.actors.channel_server``."""

    def fileno(self) -> int:
        """Readable when :meth:`drain` has something."""
        ...

    def drain(self, limit: int) -> Sequence[tuple[int, str, Any]]:
        """At most ``limit`` items ``(connection, kind, data)``; never waits."""
        ...

    def send(self, connection: int, command: Mapping[str, Any]) -> None:
        """Queue a command.

        Raises:
            ChannelError: The connection is gone or its queue is full.
        """
        ...

    def disconnect(self, connection: int, reason: str) -> None:
        """End one connection; nothing happens where it is gone."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One checked thing that an agent did or said.

    Attributes:
        kind: connected, disconnected, event, progress, log_chunk or refused.
        host: Which host; empty for a refused stranger.
        incarnation: Of its agent.
        data: The hello, the report, or ``{"reason": …}``.
    """

    kind: str
    host: str
    incarnation: int
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Peer:
    connection: int
    host: str
    incarnation: int
    pid: int
    attempt: int


class Agents:
    """The agents of a run.

    Args:
        channel: Where they dial.
        hosts: Replicas by host.
        ranks: Ranks in each group.

    Attributes:
        fenced: Says why an agent of that host and attempt may not speak for it; None where it may.
        homes: Says which replica groups are on a host by now: they may move to a spare one.
    """

    def __init__(self, channel: Channel, hosts: Mapping[str, tuple[int, ...]], *, ranks: int) -> None:
        self._channel = channel
        self.place(hosts)
        self._ranks = ranks
        self._peers: dict[int, _Peer] = {}
        self._by_host: dict[str, _Peer] = {}
        self.fenced: Callable[[str, int], str | None] = lambda _host, _attempt: None
        self.homes: Callable[[str], frozenset[int]] = lambda host: self._hosts[host]

    def place(self, hosts: Mapping[str, Sequence[int]]) -> None:
        """Replica groups by host, from now on: whoever speaks for others is dropped."""
        self._hosts = {name: frozenset(replicas) for name, replicas in hosts.items()}
        self._all = frozenset[int]().union(*self._hosts.values())

    def fileno(self) -> int:
        """Readable when :meth:`drain` has something."""
        return self._channel.fileno()

    def drain(self, limit: int) -> list[Incoming]:
        """What arrived since, in order, at most about ``limit`` items; never waits."""
        items: list[Incoming] = []
        for connection, kind, data in self._channel.drain(limit):
            try:
                if kind == "opened":
                    items += self._opened(connection, data)
                elif kind == "message":
                    items += self._message(connection, data)
                else:
                    items += self._closed(connection, str(data or "closed by the peer"))
            except ProtocolError as error:
                items += self._refuse(connection, str(error))
        return items

    def _opened(self, connection: int, peer: Any) -> list[Incoming]:
        check_hello(peer, self._hosts, replicas=self._all, ranks=self._ranks)
        host, incarnation, attempt = peer["host"], peer["incarnation"], peer.get("attempt") or 0
        shown, name = peer.get("certificate"), certificate_name(host, attempt)
        if shown is not None and shown != name:  # None: it dialled a socket that only this user reaches
            raise ProtocolError(f"who shows the certificate of {shown!r:.80} says that it is {name}")
        if (fence := self.fenced(host, attempt)) is not None:
            raise ProtocolError(fence)  # before a look at its groups, which may be elsewhere by now
        for group in peer["groups"]:
            if group["replica"] not in self.homes(host):
                raise ProtocolError(f"replica {group['replica']} does not live on this host")
        items: list[Incoming] = []
        known = self._by_host.get(host)
        if known is not None and known.attempt < attempt:
            self.fence(host, known.attempt, f"fenced: host {host} is at attempt {attempt}")
            known = None
        if known is not None and known.incarnation != incarnation:
            # Two agents of one host would each run its groups. The first one's end is noticed by its socket.
            raise ProtocolError(f"host {host} has an agent already, pid {known.pid}")
        if known is not None:
            items += self._closed(known.connection, "the agent dialled again")
            self._channel.disconnect(known.connection, "the agent dialled again")
        new = _Peer(connection, host, incarnation, peer["pid"], attempt)
        self._peers[connection] = self._by_host[host] = new
        items.append(Incoming(kind="connected", host=host, incarnation=incarnation, data=peer))
        return items

    def _message(self, connection: int, report: Any) -> list[Incoming]:
        peer = self._peers.get(connection)
        if peer is None:
            return []  # said before it learnt that it was dropped
        kind = check_report(report, replicas=self.homes(peer.host), ranks=self._ranks)
        return [Incoming(kind=kind, host=peer.host, incarnation=peer.incarnation, data=report)]

    def _closed(self, connection: int, reason: str) -> list[Incoming]:
        peer = self._peers.pop(connection, None)
        if peer is None:
            return []
        if self._by_host.get(peer.host) is peer:
            del self._by_host[peer.host]
        data = {"reason": reason}
        return [Incoming(kind="disconnected", host=peer.host, incarnation=peer.incarnation, data=data)]

    def _refuse(self, connection: int, why: str) -> list[Incoming]:
        peer = self._peers.get(connection)
        self._channel.disconnect(connection, why)
        refused = Incoming(
            kind="refused",
            host=peer.host if peer else "",
            incarnation=peer.incarnation if peer else 0,
            data={"reason": why},
        )
        return [refused, *self._closed(connection, why)]

    def fence(self, host: str, attempt: int, reason: str) -> None:
        """Hang up on the agent of one attempt at a host, for good: what it still says is not heard any more."""
        peer = self._by_host.get(host)
        if peer is not None and peer.attempt == attempt:
            del self._by_host[host], self._peers[peer.connection]
            self._channel.disconnect(peer.connection, reason)

    def connected(self, host: str) -> bool:
        """Whether that host's agent can be told something."""
        return host in self._by_host

    def pid(self, host: str) -> int | None:
        """Pid of that host's agent, while it is connected."""
        peer = self._by_host.get(host)
        return peer.pid if peer else None

    def send(self, host: str, command: Mapping[str, Any]) -> bool:
        """Tell a host's agent something.

        Returns:
            False where it is not connected: what it has to know, it is told when it connects.
        """
        peer = self._by_host.get(host)
        if peer is None:
            return False
        try:
            self._channel.send(peer.connection, command)
        except ChannelError as error:
            _log.warning("agent cannot be told", host=host, command=command.get("type"), error=str(error))
            self._channel.disconnect(peer.connection, str(error))
            return False
        return True

    def close(self) -> None:
        """End all connections."""
        self._channel.close()
