"""The Rust core, as Python sees it. Only ``sky_monarch.actors`` and the services' thin shells import it.

Core errors arrive as the classes of ``sky_monarch.errors``, one class for each kind:
invalid_input ConfigError, refused PeerRefusedError, timed_out ChannelTimeoutError, closed ChannelClosedError,
too_large FrameTooLargeError, protocol ProtocolError, io SystemCallError, quorum QuorumError, device DeviceError,
not_joined NotJoinedError, communicator CommunicatorError,
out_of_bounds OutOfBoundsError, forbidden AccessForbiddenError, stale StaleHandleError, corrupt DigestError.

All waiting is done with the GIL released, and Ctrl-C ends it within 0.1 s. No object survives a fork: in the
child its methods raise ChannelClosedError. Addresses are ``unix:<absolute path>``, or ``tls:<host>:<port>`` with
a certificate of the run, an identity: ``{"name", "ca_pem", "cert_pem", "key_pem"}``.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

__all__ = [
    "PROTOCOL_VERSION",
    "ActorBuffer",
    "ActorGateway",
    "ActorMailbox",
    "ActorNode",
    "ActorNotifier",
    "ActorReplies",
    "ActorRequest",
    "ActorTargets",
    "AgentClient",
    "ChannelClient",
    "ChannelServer",
    "Communicator",
    "DeviceBuffer",
    "LighthouseClient",
    "LighthouseControl",
    "RdmaDomain",
    "SharedBuffer",
    "actor_bytes",
    "actor_host_killed",
    "adopt_orphans",
    "buffer_segment",
    "communicator_id",
    "die_with_parent",
    "end_carriers",
    "end_descendants",
    "error_kinds",
    "gpu_report",
    "is_device_memory",
    "issue_identities",
    "issue_identity",
    "make_authority",
    "raise_kind",
    "run_agent",
    "run_lighthouse",
    "run_relay",
    "settle_forked",
    "visible_devices",
]

PROTOCOL_VERSION: Final[int]
"""Version of the messages; peers of different versions refuse each other."""

@final
class ActorBuffer:
    """Received memory: a private copy-on-write mapping of what the sender has sealed. A writable buffer."""

    def __len__(self) -> int: ...

@final
class ActorGateway:
    """How the processes of this host reach those of others: one TLS connection to each, shared by all."""

    def __new__(
        cls,
        folder: str,
        token: str,
        host: str,
        version: str,
        identity: Mapping[str, str],
        *,
        hub: bool,
        listen: str | None = None,
    ) -> ActorGateway:
        """Serve the processes whose sockets are in ``folder``.

        Args:
            folder: Names this host among those of the mesh.
            token: Secret of its processes.
            host: What people call it.
            version: Of this installation: peers of another one are refused.
            identity: This host's certificate.
            hub: Whether this is the program's own host, to which the others are attached.
            listen: ``tls:<host>:<port>``, where other hosts may dial.

        Raises:
            ConfigError: The address or the certificate cannot be used.
            SystemCallError: Somebody listens there already, or the operating system said no.
        """

    @property
    def address(self) -> str | None:
        """Where it listens for hosts."""

    def dial(self, address: str, name: str, timeout_s: float) -> tuple[str, str]:
        """Connect to a host, whose certificate must hold ``name``; returns its folder and what people call it.

        Raises:
            PeerRefusedError: One of the two does not want the other; the message says why.
            ChannelClosedError: Nobody listens.
            ChannelTimeoutError: Nobody answers.
            SystemCallError: The operating system said no.
        """

    def line(self, folder: str) -> int | None:
        """What names the connection to a host, for who has to tell of its end; None where there is none."""

    def route(self, folder: str, address: str | None, via: str) -> None:
        """A host may be reached at ``address``, else through the host ``via``."""

    def event(self, timeout_s: float) -> tuple[Literal["joined", "lost"], str, str, str] | None:
        """The next ``("joined", folder, host, name in its certificate)`` or ``("lost", folder, reason, how)``.

        ``how`` is ``left`` where the host has taken its leave, and empty where it was cut off, or killed.
        """

    def hang_up(self, name: str) -> None:
        """The process with this socket has ended: what it owes to other hosts has failed."""

    def drop_host(self, folder: str, reason: str) -> None:
        """Hang up on a host, which then counts as lost."""

    def place(self, folder: str, by: str) -> None:
        """Have the host ``by`` take the place of a lost one, for all hosts: what is addressed to that goes to it."""

    def sessions(self) -> int:
        """Connections between one process and one other host that are open."""

    def close(self) -> None:
        """End every connection. Does nothing the second time."""

@final
class ActorTargets:
    """Processes to be called: ``(address, place)`` of each. The place is empty where it is the actor's own."""

    def __new__(cls, targets: Sequence[tuple[str, str]]) -> ActorTargets: ...
    def __len__(self) -> int: ...

@final
class ActorNotifier:
    """How an event loop hears of answers and messages: tokens, and a descriptor to wait on."""

    def __new__(cls) -> ActorNotifier: ...
    def fileno(self) -> int:
        """An eventfd, open for as long as this object lives."""

    def push(self, token: int) -> None:
        """Leave a token."""

    def drain(self) -> list[int]:
        """Take all tokens; never waits."""

@final
class ActorReplies:
    """The answers to one call. Dropping it gives up the answers, not the call."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all answers, or for the next one of a call that is told of each; False when time is up."""

    def is_ready(self) -> bool:
        """True where ``wait`` would return at once."""

    def left(self) -> int:
        """Targets that have not answered."""

    def take(self) -> list[tuple[int, int, Any, list[Any]]]:
        """Take what has arrived: ``(slot, kind, body, buffers)``.

        Of kind -1 the process is gone: the body says why, and in place of buffers is when it was called
        (`time.monotonic`).
        """

    def notify(self, notifier: ActorNotifier, token: int) -> None:
        """Have ``token`` left there once, when ``wait`` would return."""

    def cancel(self) -> None:
        """Want no answer any more, and tell those who owe one."""

@final
class ActorRequest:
    """A message for an actor. Dropped without an answer, it answers with kind 255."""

    @property
    def method(self) -> str:
        """What the actor is asked for."""

    @property
    def key(self) -> tuple[int, int]:
        """What a cancellation names."""

    @property
    def wants_answer(self) -> bool:
        """True where the caller waits for one."""

    def open(self) -> tuple[str, str, Any, list[Any]]:
        """Method, place, body and buffers."""

    def reply(self, kind: int, body: bytes, buffers: Sequence[Any] | None = None, soon: bool = False) -> None:
        """Answer. A second answer, and one that nobody waits for, is dropped.

        Args:
            kind: What the two sides agreed on.
            body: Of the answer.
            buffers: Beside it.
            soon: It may leave together with others, within a millisecond, or when this process waits for a message.

        Raises:
            ChannelClosedError: The caller is gone.
            ChannelTimeoutError: The caller does not read.
        """

@final
class ActorMailbox:
    """The queue of one actor, bounded: where it is full, its senders' connections are not read."""

    def recv(
        self, timeout_s: float | None = None, most: int = 64, urgent: bool = True
    ) -> list[ActorRequest | tuple[int, int]]:
        """Wait for messages and take up to ``most``. A pair is the key of a message whose answer nobody wants any more.

        Args:
            timeout_s: Seconds; None waits for ever.
            most: Messages.
            urgent: This thread reads the sockets itself while it waits.

        Returns:
            Empty when time is up, or when the mailbox is closed.
        """

    def notify(self, notifier: ActorNotifier) -> None:
        """Have a token left there when something has arrived."""

    @property
    def closed(self) -> bool:
        """True once it takes no more messages."""

    def close(self) -> None:
        """Take no more messages; those that wait are answered with kind 255."""

@final
class ActorNode:
    """This process among those of a mesh: its socket, its connections, its mailboxes, its calls."""

    def __new__(cls, address: str, token: str, listener_fd: int, send_limit_s: float) -> ActorNode:
        """Serve a listening unix socket, taken over from here on.

        Args:
            address: Its path.
            token: Secret of the mesh: a peer without it is refused.
            listener_fd: The socket.
            send_limit_s: How long a sender waits for a receiver that takes nothing.

        Raises:
            ConfigError: There is no token or no socket.
            SystemCallError: The operating system said no.
        """

    @property
    def address(self) -> str:
        """Path of its socket."""

    def mailbox(self, actor: int) -> ActorMailbox:
        """The mailbox of ``actor``. Messages may have come before it."""

    def call(
        self,
        targets: ActorTargets,
        actor: int,
        method: str,
        body: bytes,
        buffers: Sequence[Any] | None = None,
        each: bool = False,
    ) -> ActorReplies:
        """Call ``method`` of ``actor`` in each target.

        Raises:
            ChannelTimeoutError: A receiver does not keep up.
        """

    def send(
        self,
        targets: ActorTargets,
        actor: int,
        method: str,
        body: bytes,
        buffers: Sequence[Any] | None = None,
    ) -> list[tuple[int, str]]:
        """The same without an answer; returns the targets that are gone, and why."""

    def hang_up(self, address: str, reason: str) -> None:
        """The process there has ended: what it owes has failed."""

    def links(self) -> int:
        """Connections that are open."""

    def open_calls(self) -> int:
        """Calls that are owed an answer."""

    def close(self) -> None:
        """End every connection and every wait."""

@final
class ChannelServer:
    """Listens for agents, for one event loop to serve."""

    def __new__(
        cls,
        address: str,
        token: str,
        run_id: str,
        *,
        identity: Mapping[str, str] | None = None,
        listener_fd: int | None = None,
    ) -> ChannelServer:
        """Listen at ``address``, and on an inherited TCP socket where one is given.

        Args:
            address: Where. A socket that a dead process left is replaced.
            token: Secret of the run, not empty: a peer without it is refused.
            run_id: A peer of another run is refused.
            identity: This side's certificate, for TLS.
            listener_fd: A listening TCP socket, taken over from here on; TLS is spoken there.

        Raises:
            ConfigError: The address, the token, the certificate or the socket cannot be used.
            SystemCallError: Somebody listens there already, or the operating system said no.
        """

    @property
    def address(self) -> str:
        """Where it listens: ``address``."""

    @property
    def tls_address(self) -> str | None:
        """``tls:<address>:<port>`` of the inherited socket; None without one."""

    def fileno(self) -> int:
        """An eventfd, readable when ``drain`` has something; open for as long as this object lives."""

    def drain(self, limit: int = 1024) -> list[tuple[int, Literal["opened", "message", "closed"], Any]]:
        """Take what has arrived, ``limit`` events at most; never waits.

        Returns:
            ``(connection, kind, data)`` in order. For each connection: one ``opened`` (data: the peer,
            ``{"role": "agent", "host", "attempt", "pid", "incarnation", "groups", "probe", "certificate"}``, the
            last one the name in its certificate, None on a unix socket), any number of ``message`` (data: a
            report, a dict with a ``type``), one ``closed`` (data: the reason, a str). Connection numbers are
            never used again.

        Raises:
            ChannelClosedError: The server was closed.
        """

    def send(self, connection: int, command: Mapping[str, Any]) -> None:
        """Queue a command, a dict with a ``type``; never waits.

        Raises:
            ConfigError: ``command`` is no command of the protocol.
            ChannelClosedError: The connection is gone, or the server was closed.
            FrameTooLargeError: The command, or the queue of a peer that does not keep up, exceeds its bound.
        """

    def disconnect(self, connection: int, reason: str) -> None:
        """Hang up on one peer, after what is queued for it and the reason; nothing happens where it is gone.

        An agent whose reason begins with ``fenced:`` ends its ranks and itself.

        Raises:
            ChannelClosedError: The server was closed.
        """

    def close(self) -> None:
        """Stop listening and hang up, after what is queued (2 s at most). Does nothing the second time."""

@final
class ChannelClient:
    """One connection that says whatever it is told to: for simulated agents, and hostile ones."""

    def __new__(
        cls,
        address: str,
        token: str,
        run_id: str,
        hello: Mapping[str, Any],
        timeout_s: float,
        identity: Mapping[str, str] | None = None,
    ) -> ChannelClient:
        """Dial ``address``.

        Args:
            address: Where the peer listens.
            token: Secret of the run.
            run_id: The run.
            hello: Who dials: ``{"role": "agent", ...}`` or ``{"role": "session", ...}``.
            timeout_s: Longest wait for the peer's answer, in seconds.
            identity: This side's certificate, for TLS.

        Raises:
            ConfigError: The address, ``hello`` or the certificate cannot be used.
            PeerRefusedError: The peer does not want us; the message says why.
            ChannelClosedError: Nobody listens.
            ChannelTimeoutError: Nobody answers.
        """

    def send(self, message: object) -> None:
        """Send anything that msgpack can hold; waits while the peer does not keep up, 10 s at most.

        Raises:
            ChannelClosedError: The connection is gone.
            ChannelTimeoutError: The peer does not keep up.
            FrameTooLargeError: It exceeds the bound of a frame.
        """

    def recv(self, timeout_s: float) -> Any:
        """Wait for the next message; None after ``timeout_s``.

        Raises:
            ChannelClosedError: The connection is gone and everything was received.
        """

    def close(self) -> None:
        """Hang up, after what is queued (2 s at most). Does nothing the second time."""

@final
class AgentClient:
    """A session's connection to its agent; dialled again by itself when it is lost."""

    def __new__(
        cls,
        address: str,
        token: str,
        run_id: str,
        replica: int,
        rank: int,
        generation: int,
        target_step: int | None,
        timeout_s: float,
    ) -> AgentClient:
        """Dial the agent; one that is not there yet is waited for.

        Args:
            address: Where the agent listens.
            token: Secret of the run.
            run_id: The run.
            replica: Replica group of this process.
            rank: Rank inside the group.
            generation: Generation this process was started as.
            target_step: Step at which the work is done; None where that is not known.
            timeout_s: Longest wait, in seconds.

        Raises:
            ConfigError: The address cannot be used.
            PeerRefusedError: The agent does not want this session; the message says why.
            ChannelTimeoutError: No agent, or no answer, within ``timeout_s``.
        """

    def committed(
        self,
        step: int,
        quorum_id: int | None = None,
        participants: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Report a committed step; never waits. Latest wins: a slow agent sees fewer steps, never old ones.

        Args:
            step: Steps committed so far.
            quorum_id: Quorum in which it was committed.
            participants: Replica groups that took part.
            metrics: Whatever else was measured.

        Raises:
            ChannelClosedError: The client was closed.
            PeerRefusedError: An agent has refused this session since (a newer generation took its place).
        """

    def done(self, step: int) -> None:
        """Report that the target step is committed; never waits. Raises as ``committed``."""

    def pause(self, what: str, limit_s: float) -> None:
        """Expect no commit for ``limit_s`` seconds; 0 ends the pause. Raises as ``committed``."""

    def recv(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait for the agent's next command.

        While the agent is away this waits too: the connection comes back.

        Returns:
            The command, a dict with a ``type`` (drain, inject, release, dead); None after ``timeout_s``.

        Raises:
            ChannelClosedError: The client was closed.
            PeerRefusedError: An agent has refused this session since.
        """

    def close(self) -> None:
        """Let the last reports leave (3 s at most) and hang up. Does nothing the second time."""

@final
class LighthouseClient:
    """A connection to a lighthouse, TorchFT's or ours; made again by itself when it is lost."""

    def __new__(cls, address: str, connect_timeout_s: float) -> LighthouseClient:
        """Connect to ``address`` (``http://host:port``); a lighthouse that is not there yet is waited for.

        Raises:
            ConfigError: The address cannot be used.
            ChannelTimeoutError: No lighthouse within ``connect_timeout_s``.
        """

    def heartbeat(self, replica_id: str, timeout_s: float = 5.0) -> None:
        """Say that ``replica_id`` lives. Raises as ``quorum``."""

    def quorum(
        self,
        replica_id: str,
        step: int,
        *,
        address: str = "",
        store_address: str = "",
        world_size: int = 1,
        shrink_only: bool = False,
        data: str = "",
        commit_failures: int = 0,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Ask for a quorum and wait until it has formed.

        Args:
            replica_id: Who asks; unique among all that ask.
            step: Step it has reached.
            address: Address of its manager.
            store_address: Address of its rendezvous store.
            world_size: Ranks in its group.
            shrink_only: It wants a quorum without newcomers.
            data: Free text, passed on to every member.
            commit_failures: Commits that failed in a row.
            timeout_s: Longest wait, in seconds; the lighthouse is told.

        Returns:
            ``{"quorum_id": int, "participants": [...], "created_ms": int}``, participants sorted by replica
            id, each with the arguments above as keys.

        Raises:
            ChannelTimeoutError: No quorum within ``timeout_s``.
            ChannelClosedError: The lighthouse is away.
            PeerRefusedError: The lighthouse does not know us (any more).
            QuorumError: Anything else that the lighthouse says.
        """

@final
class LighthouseControl:
    """Tells our lighthouse who died; dials with the first call, and anew where the line broke."""

    def __new__(cls, address: str, token: str, run_id: str) -> LighthouseControl:
        """Nothing is dialled yet.

        Args:
            address: Control channel of the lighthouse.
            token: Secret of the run.
            run_id: The run.

        Raises:
            ConfigError: The address cannot be used.
        """

    def evict(self, replica: int, generation: int, timeout_s: float) -> int | None:
        """Take every generation of ``replica`` up to ``generation`` out of the quorum, for good.

        Args:
            replica: Replica group.
            generation: Newest generation that is over.
            timeout_s: Longest wait, tries at a lighthouse that is down included.

        Returns:
            Id of the last quorum that held one of them; None where no quorum did.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``. To repeat it is harmless.
            PeerRefusedError: The token or the run is another's.
        """

    def expect(self, replicas: int, timeout_s: float) -> None:
        """Let a start wait for so many replica groups from now on.

        Args:
            replicas: Of the run.
            timeout_s: Longest wait, tries at a lighthouse that is down included.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``. To repeat it is harmless.
            PeerRefusedError: The token or the run is another's.
        """

    def state(self, timeout_s: float) -> str:
        """Everything the lighthouse knows, as JSON text.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``.
            PeerRefusedError: The token or the run is another's.
        """

def adopt_orphans() -> None:
    """Make this process the one that the descendants of a dead child are handed to."""

def actor_host_killed(
    identity: Mapping[str, str], address: tuple[str, str], who: tuple[str, int], timeout_s: float
) -> None:
    """Tell a program that the process which had dialled it from a host was killed.

    Args:
        identity: The host's certificate.
        address: ``tls:<host>:<port>`` of the program, and the name in its certificate.
        who: Folder of the host, and the number of its connection to the program, as ``ActorGateway.line`` said there.
        timeout_s: Longest try.

    Raises:
        PeerRefusedError: The program does not know this host.
        ChannelClosedError: Nobody listens.
        ChannelTimeoutError: Nobody answers.
        SystemCallError: The operating system said no.
    """

def actor_bytes(buffer: Any) -> bytes:
    """The bytes of a large contiguous buffer. Copied by several threads, with the GIL released.

    Raises:
        BufferError: It is not contiguous.
    """

def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that forked it ends.

    Args:
        parent: The process that forked it; where that has ended already, this one ends at once.

    Raises:
        SystemCallError: The operating system said no.
    """

def end_descendants(limit_s: float) -> tuple[list[int], list[int]]:
    """Kill and reap every descendant of this process, which has no threads.

    Args:
        limit_s: Longest time for it.

    Returns:
        The pids that were killed, and those that are alive all the same.
    """

def gpu_report(*, bench: bool = False) -> str:
    """Load this platform's libraries and try each device.

    For a process of its own: it may hang where a device does, and nothing may be forked after it.

    Args:
        bench: Also measure copies to, from and inside each device.

    Returns:
        JSON, as ``sky_monarch.doctor`` reads it.
    """

def issue_identities(run_id: str, names: list[str], lifetime_s: float) -> str:
    """Make the authority of one run, and a certificate of it for each name; the authority itself is not kept.

    Args:
        run_id: Name of the authority.
        names: What the peers are called: ``lighthouse``, ``agent``.
        lifetime_s: How long they are valid.

    Returns:
        JSON, by name: ``{"name", "ca_pem", "cert_pem", "key_pem"}``. Secret.
    """

def make_authority(run_id: str, lifetime_s: float) -> str:
    """Make the certificate authority of one run.

    Args:
        run_id: The run.
        lifetime_s: How long it and its certificates are valid.

    Returns:
        JSON: ``{"run_id", "ca_pem", "key_pem", "expires_s"}``, the last one Unix time. Secret.
    """

def issue_identity(authority: str, name: str) -> str:
    """Issue a certificate, good for as long as the authority.

    Args:
        authority: JSON from ``make_authority``.
        name: Name of the peer: letters, digits, hyphens; 63 at most.

    Returns:
        JSON: ``{"name", "ca_pem", "cert_pem", "key_pem"}``. Secret.

    Raises:
        ConfigError: The authority or the name cannot be used.
    """

def settle_forked(agent: int, spawn_id: str, nice: int, limit_s: float) -> None:
    """Make this process, forked twice by a fork server a moment ago, as good as one that its agent has spawned.

    It leads its own session, dies with the agent, and carries its own mark in the process table.

    Args:
        agent: Pid of the agent, which has to become the parent.
        spawn_id: Mark of this process's tree; as long as the fork server's own.
        nice: Niceness.
        limit_s: Longest wait for the agent to become the parent.

    Raises:
        MonarchError: It did not, or this process was started without a mark.
    """

def run_agent(config_json: str) -> int:
    """Run the host agent until it ends, with this process as its own; returns its exit code.

    Raises:
        ConfigError: The configuration cannot be used.
    """

def run_lighthouse(config_json: str) -> int:
    """Run the lighthouse until it ends, with this process as its own; returns its exit code.

    Raises:
        ConfigError: The configuration cannot be used.
    """

def run_relay(config_json: str) -> int:
    """Run the relay of a tunnel until it ends, with this process as its own; returns its exit code.

    Raises:
        ConfigError: The configuration cannot be used.
    """

def error_kinds() -> list[str]:
    """Names of all kinds of error that the core knows (for tests)."""

def raise_kind(kind: str, message: str) -> None:
    """Raise the class that stands for ``kind`` (for tests)."""

def visible_devices(
    uuids: list[str], *, rocr: str | None = None, hip: str | None = None, cuda: str | None = None
) -> list[int]:
    """Indices of the devices that masks leave, in the order in which a process counts them.

    Args:
        uuids: Unique id of each device as hexadecimal digits, in the driver's order.
        rocr: ``ROCR_VISIBLE_DEVICES``, which filters first; None where it is not set.
        hip: ``HIP_VISIBLE_DEVICES``, which counts inside what that leaves.
        cuda: ``CUDA_VISIBLE_DEVICES``, an alias of it.

    Raises:
        ConfigError: A mask names a device that is not there, names one twice, or two of them differ.
    """

@final
class DeviceBuffer:
    """Memory of a device; its contents are undefined at first. Freed with the object, which has to outlive its use."""

    def __new__(cls, nbytes: int, *, device: int = 0) -> DeviceBuffer:
        """Allocate ``nbytes``, 1 at least.

        Raises:
            DeviceError: There is no such device, or no room on it.
            ConfigError: ``nbytes`` is 0.
        """

    @property
    def address(self) -> int:
        """Where it begins, on the device."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    @property
    def device(self) -> int:
        """Whose memory it is."""

    def write(self, data: bytes, *, offset: int = 0) -> None:
        """Copy ``data`` to it, and wait.

        Raises:
            ConfigError: It does not fit.
            DeviceError: The copy failed.
        """

    def read(self, nbytes: int | None = None, *, offset: int = 0) -> bytes:
        """Copy from it, by default to its end, and wait.

        Raises:
            ConfigError: That is not inside of it.
            DeviceError: The copy failed.
        """

@final
class Communicator:
    """A rank's end of a communicator between devices. Dropped, it is aborted.

    Memory is passed as ``(address, bytes)`` and an ``owner`` that keeps it valid, which is held until the stream has
    done it. ``stream`` is a stream of the device's runtime (by default one of its own), which the caller keeps alive.

    Raises, from any method: CommunicatorError where it is over or becomes so, DeviceError where the device is lost with
    it, ConfigError for what cannot be used (the library is then not called).
    """

    def __new__(
        cls,
        unique_id: bytes,
        rank: int,
        ranks: int,
        *,
        device: int,
        start_s: float,
        operation_s: float,
        abort_s: float,
    ) -> Communicator:
        """Join, and return once all ranks have come.

        Raises:
            NotJoinedError: They have not come within ``start_s``.
        """

    @property
    def rank(self) -> int:
        """Which one this is."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    def all_reduce(
        self,
        send: tuple[int, int],
        receive: tuple[int, int],
        dtype: str,
        op: str,
        owner: object,
        *,
        stream: int | None = None,
    ) -> None:
        """Reduce what all ranks send; each receives the result. Puts it on the stream, as all of these do."""

    def broadcast(
        self,
        send: tuple[int, int],
        receive: tuple[int, int],
        dtype: str,
        root: int,
        owner: object,
        *,
        stream: int | None = None,
    ) -> None:
        """Send what rank ``root`` has to all."""

    def all_gather(
        self,
        send: tuple[int, int],
        receive: tuple[int, int],
        dtype: str,
        owner: object,
        *,
        stream: int | None = None,
    ) -> None:
        """Receive what all ranks send, in their order."""

    def reduce_scatter(
        self,
        send: tuple[int, int],
        receive: tuple[int, int],
        dtype: str,
        op: str,
        owner: object,
        *,
        stream: int | None = None,
    ) -> None:
        """Reduce what all ranks send; each receives its part."""

    def exchange(
        self,
        sends: Sequence[tuple[int, tuple[int, int]]],
        receives: Sequence[tuple[int, tuple[int, int]]],
        owner: object,
        *,
        stream: int | None = None,
    ) -> None:
        """Send to and receive from other ranks at once, each ``(rank, memory)``."""

    def wait(self, timeout_s: float, *, stream: int | None = None) -> None:
        """Wait until the stream has done what is on it; past the time the communicator is aborted."""

    def failure(self) -> str | None:
        """Why it is over; None while it is not."""

    def abort(self) -> None:
        """End it for all ranks."""

    def close(self, timeout_s: float) -> None:
        """End it in order, which all ranks have to do; what is under way is finished before."""

def communicator_id() -> bytes:
    """A new id, 128 bytes, which one rank makes and all start with. Who has it and reaches these hosts can join.

    Raises:
        DeviceError: This host has no accelerators, or no library for them.
    """

@final
class SharedBuffer:
    """Zeroed memory that processes of this host can map; a writable buffer."""

    def __new__(cls, nbytes: int) -> SharedBuffer:
        """Allocate ``nbytes``, 1 at least.

        Raises:
            ConfigError: ``nbytes`` is 0.
            SystemCallError: The operating system has no room.
        """

    @property
    def nbytes(self) -> int:
        """Its length."""

    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class RdmaDomain:
    """Registers memory, and reads and writes that of others.

    Memory is passed as ``segments``, pairs of address and length, and ``owner``, an object that keeps them valid: it
    is held until nothing uses them any more. ``place`` says where they lie: None for memory of this process;
    ``"device"`` for addresses of accelerators, and of the host among them, whose devices have done what they were to
    do with them; else nobody can follow the addresses, only their lengths count, and it copies what they stand for.
    Such an object has three methods, which are called in threads of the core: ``room(nbytes)`` returns the address of
    memory of this process and an object that keeps it; ``fetch(offset, address, nbytes)`` copies from the range to
    there, and ``store(offset, address, nbytes)`` back. Both return when it is done.
    """

    def __new__(
        cls, address: str, secret: str, *, max_connections: int = 256, bytes_per_s: int | None = None
    ) -> RdmaDomain:
        """Listen at a free port.

        Args:
            address: Numeric, of one interface.
            secret: Of the run; it is never sent. Who cannot prove that it has it is refused.
            max_connections: More are hung up on.
            bytes_per_s: What may leave in all. With a limit peers may not read by themselves.

        Raises:
            ConfigError: The address or the secret cannot be used.
            SystemCallError: The operating system said no.
        """

    @property
    def address(self) -> str:
        """Where peers ask: ``<address>:<port>``."""

    def register(
        self,
        segments: Sequence[tuple[int, int]],
        owner: object,
        *,
        epoch: int = 0,
        writable: bool = False,
        place: object = None,
    ) -> str:
        """Let peers reach memory; returns its handle as text. Of a ``SharedBuffer`` as ``owner`` all of it.

        Raises:
            ConfigError: A segment is nowhere.
            FrameTooLargeError: Too much is registered already.
        """

    def deregister(self, handle: str, timeout_s: float) -> bool:
        """Let nobody reach it any more, and wait for who is just doing so.

        Returns:
            Whether readers had to be revoked: what they have read does not count.

        Raises:
            ChannelTimeoutError: Something may still be written to it; its owner is held until that has ended.
        """

    def announce(self, name: str, serial: int, text: str) -> None:
        """Let peers find ``text``.

        Raises:
            StaleHandleError: ``serial`` was retracted.
            FrameTooLargeError: The text, the name or what is announced exceeds its bound.
        """

    def retract(self, serial: int) -> None:
        """Take back what was announced up to ``serial``, for good."""

    def lookup(self, address: str, name: str, serial: int, timeout_s: float) -> str:
        """What the domain at ``address`` has announced, or announces in time.

        Raises:
            StaleHandleError: It has gone on.
            ChannelTimeoutError: It has announced nothing.
            ChannelClosedError: It is gone.
            PeerRefusedError: It does not belong to this run.
        """

    def read_into(
        self,
        handles: Sequence[str],
        segments: Sequence[tuple[int, int]],
        owner: object,
        *,
        timeout_s: float,
        offset: int = 0,
        digest: bool = True,
        keep: bool = False,
        streams: int | None = None,
        path: str | None = None,
        place: object = None,
    ) -> dict[str, Any]:
        """Fill memory from owners that hold the same bytes; the first decides what they are.

        Args:
            handles: Of the owners. A piece that one does not give, or gives wrong, is read from another.
            segments: To be filled.
            owner: Of them.
            timeout_s: For all of it.
            offset: Where the bytes begin in the owners' memory.
            digest: Whether each piece is checked.
            keep: Whether a piece is left as it is where its digest is right.
            streams: Threads for each owner.
            path: ``cma``, ``shm``, ``ibverbs`` or ``tcp``; None for the best.
            place: Where ``segments`` lie.

        Returns:
            ``{"bytes", "kept", "again", "owners": [{"bytes", "path", "lost"}]}``; ``kept``: bytes that were there
            already, ``again``: pieces read more than once.

        Raises:
            OutOfBoundsError: The range is not inside.
            StaleHandleError: It was withdrawn.
            DigestError: Bytes arrived wrong.
            ChannelClosedError: The owner is gone.
            ChannelTimeoutError: ``timeout_s`` is over, or the owner hangs.
            PeerRefusedError: It does not belong to this run.
            SystemCallError: ``path`` does not lead there.
        """

    def write_from(
        self,
        handle: str,
        segments: Sequence[tuple[int, int]],
        owner: object,
        *,
        timeout_s: float,
        offset: int = 0,
        digest: bool = True,
        streams: int | None = None,
        path: str | None = None,
        place: object = None,
    ) -> dict[str, Any]:
        """Write memory to an owner. After an error the range is undefined.

        Raises:
            AccessForbiddenError: It is not to be written to.
        """

    def close(self) -> None:
        """Withdraw everything and hang up. Does nothing the second time."""

def end_carriers(timeout_s: float) -> None:
    """Let no thread of the core into Python any more, which is about to end, and wait for those that are there."""

def is_device_memory(address: int) -> bool:
    """Whether an address is one of an accelerator that this process's runtime knows. Loads its library."""

def buffer_segment(object: object, writable: bool) -> tuple[int, int]:  # noqa: A002
    """Address and length of a contiguous buffer, valid for as long as a view of it is held.

    Raises:
        BufferError: It is not contiguous, or not writable.
    """
