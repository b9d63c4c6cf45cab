"""A client of the lighthouse, TorchFT's or ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, cast

from sky_monarch.errors import ChannelTimeoutError, QuorumTimeoutError

if TYPE_CHECKING:
    from typing import Unpack


class QuorumMember(TypedDict):
    """One member of a quorum, with the words of its own request."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int


class Quorum(TypedDict):
    """A quorum as the lighthouse formed it.

    ``participants`` is sorted by replica id; ``created_ms`` is Unix time in milliseconds, for people.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created_ms: int


class QuorumRequest(TypedDict, total=False):
    """What may be said with a request besides who asks and how far it is.

    ``address``: of its manager. ``store_address``: of its rendezvous store. ``world_size``: ranks in its
    group (1).
    ``shrink_only``: no newcomers. ``data``: free text for all members. ``commit_failures``: failed in a row.
    """

    address: str
    store_address: str
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int


class LighthouseClient:
    """Asks a lighthouse for quorums. The connection is made again by itself where it is lost."""

    def __init__(self, address: str, connect_timeout_s: float = 30.0) -> None:
        """Connect.

        Args:
            address: ``http://host:port``; what stands before an ``@`` says who we are.
            connect_timeout_s: Longest wait for a lighthouse that is not there yet.

        Raises:
            ConfigError: The address cannot be used.
            ChannelTimeoutError: No lighthouse within ``connect_timeout_s``.
        """
        from sky_monarch import _core

        self._core = _core.LighthouseClient(address, connect_timeout_s)

    def heartbeat(self, replica_id: str, timeout_s: float = 5.0) -> None:
        """Say that ``replica_id`` lives.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``.
            ChannelClosedError: The lighthouse is away.
            PeerRefusedError: The lighthouse does not know us (any more).
            QuorumError: Anything else that the lighthouse says.
        """
        self._core.heartbeat(replica_id, timeout_s)

    def quorum(
        self, replica_id: str, step: int, *, timeout_s: float, **request: Unpack[QuorumRequest]
    ) -> Quorum:
        """Ask for a quorum and wait until it has formed.

        Args:
            replica_id: Who asks; unique among all that ask.
            step: Step it has reached.
            timeout_s: Longest wait; the lighthouse is told.
            **request: See ``QuorumRequest``.

        Raises:
            QuorumTimeoutError: No quorum within ``timeout_s``.
            ChannelClosedError: The lighthouse is away.
            PeerRefusedError: The lighthouse does not know us (any more).
            QuorumError: Anything else that the lighthouse says.
        """
        try:
            quorum = self._core.quorum(replica_id, step, timeout_s=timeout_s, **request)
        except ChannelTimeoutError as late:
            raise QuorumTimeoutError(str(late), hint="are enough replica groups up?") from late
        return cast("Quorum", quorum)
