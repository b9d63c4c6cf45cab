"""The controller's end of its channels to the agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self


class ChannelEvent(NamedTuple):
    """What happened on one connection.

    Attributes:
        connection: Number of the connection, never used again.
        kind: ``opened`` once, ``message`` any number of times, ``closed`` once.
        data: ``opened``: the peer (``{"role": "agent", "host", "attempt", "pid", "incarnation", "groups",
            "probe", "certificate"}``, the last one the name in its certificate, None on a unix socket);
            ``message``: a report, a dict with a ``type``; ``closed``: the reason.
    """

    connection: int
    kind: Literal["opened", "message", "closed"]
    data: Any


class ChannelServer:
    """Listens for agents. Made for an event loop: watch ``fileno()``, and ``drain()`` when it is readable."""

    def __init__(
        self,
        address: str,
        token: str,
        run_id: str,
        *,
        identity: Mapping[str, str] | None = None,
        listener_fd: int | None = None,
    ) -> None:
        """Listen at ``address``, and on an inherited TCP socket where one is given.

        Over TLS an agent is who its certificate says: ``<host>-a<attempt>``, or ``<host>`` for attempt 0.

        Args:
            address: ``unix:<absolute path>``; a socket that a dead process left is replaced.
            token: Secret of the run, not empty: a peer without it is refused.
            run_id: A peer of another run is refused.
            identity: This side's certificate (``controller``), from ``Authority.issue``.
            listener_fd: A listening TCP socket, taken over: nobody else may close it. TLS is spoken there.

        Raises:
            ConfigError: The address, the token, the certificate or the socket cannot be used.
            SystemCallError: Somebody listens there already, or the operating system said no.
        """
        from sky_monarch import _core

        self._core = _core.ChannelServer(address, token, run_id, identity=identity, listener_fd=listener_fd)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._core.address

    @property
    def tls_address(self) -> str | None:
        """``tls:<address>:<port>`` of the inherited socket; None without one."""
        return self._core.tls_address

    def fileno(self) -> int:
        """File descriptor, readable when ``drain`` has something; open as long as this object lives."""
        return self._core.fileno()

    def drain(self, limit: int = 1024) -> list[ChannelEvent]:
        """Take what has arrived, in order, ``limit`` events at most; never waits.

        Raises:
            ChannelClosedError: The server was closed.
        """
        return [ChannelEvent(*event) for event in self._core.drain(limit)]

    def send(self, connection: int, command: Mapping[str, Any]) -> None:
        """Queue a command for one agent; never waits.

        Args:
            connection: From ``ChannelEvent.connection``.
            command: A dict with a ``type``, as ``protocol.rs`` says.

        Raises:
            ConfigError: ``command`` is no command of the protocol.
            ChannelClosedError: The connection is gone, or the server was closed.
            FrameTooLargeError: The command, or the queue of an agent that does not keep up, exceeds its
            bound.
        """
        self._core.send(connection, command)

    def disconnect(self, connection: int, reason: str) -> None:
        """Hang up on one agent, after what is queued for it and the reason; nothing happens where it is gone.

        Args:
            connection: From ``ChannelEvent.connection``.
            reason: Told to the agent. Where it begins with ``fenced:``, that ends its ranks and itself.

        Raises:
            ChannelClosedError: The server was closed.
        """
        self._core.disconnect(connection, reason)

    def close(self) -> None:
        """Stop listening and hang up, after what is queued (2 s at most). Does nothing the second time."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
