"""TorchFT's Manager, with the few corners smoothed that a session stumbles over."""

from __future__ import annotations

import logging
import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torchft import Manager
from torchft.manager import MANAGER_ADDR_KEY

from sky_monarch.errors import QuorumError
from sky_monarch.training.healing import Following, Source, StripedTransport
from sky_monarch.training.process_group import MeshSockets
from sky_monarch.training.transport import Heal, Healing
from sky_monarch.training.tunnel import Tunnel

__all__ = ["SessionManager", "quiet_torchft"]


logger = logging.getLogger(__name__)

_LONGEST_JOIN_S = 5.0


class SessionManager(Manager):  # type: ignore[misc]  # torchft has no type information
    """A Manager whose quorum call cannot keep the process from exiting.

    TorchFT runs it in a thread pool that Python joins at exit, and nothing ends a call under way: a rank
    that was asked to leave while it waited would sit there for the whole quorum timeout.
    """

    _client: Any  # TorchFT's, of this group's manager

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._transport: Healing = arguments["checkpoint_transport"]
        self._executor = _DaemonExecutor("torchft_quorum")
        self._client = _Listening(self._client, self._hears)
        self._behind = 0
        self._commit_failures: int = 0

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """As TorchFT's."""
        self._behind = self._step
        if isinstance(self._transport, StripedTransport):
            self._transport.following = None
            self._transport.settle()
        super().start_quorum(allow_heal, shrink_only, timeout)

    @property
    def following(self) -> Following | None:
        """What this process does in a step that it takes part in while its state is still coming; else None."""
        transport = self._transport
        return transport.following if self._healing and isinstance(transport, StripedTransport) else None

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """As TorchFT's; no where a donor's state is still coming, of which nothing is applied."""
        if self.following is None:
            return bool(super().should_commit(timeout))
        if error := self._pg.errored():
            self.report_error(error)
        if self.errored() is None:
            self.forget_votes()
        else:
            self._commit_failures += 1  # asks for another mesh
        # To the lighthouse this group is as far as it was: who is behind gets a donor, and is counted by nobody.
        self._pending_state_dict, self._step = None, self._behind
        return False

    def _hears(self, quorum: Any) -> None:
        """What its quorum tells a member, in each step: who gets a donor assigned, others can give something, too."""
        transport = self._transport
        others_heal = quorum.max_world_size < quorum.replica_world_size and not quorum.heal
        # Of a new quorum the members tell each other what they have when they meet.
        met_before = quorum.quorum_id == self._quorum_id
        if others_heal and met_before and isinstance(transport, StripedTransport):
            transport.give(quorum.max_step)

    def dial_through(self, tunnel: Tunnel | None) -> None:
        """Have the manager of a donor be reached through a tunnel, where there is one."""
        if tunnel is not None:
            self._client = _ThroughTunnel(self._client, tunnel)

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and end a quorum call under way."""
        if self.quorum_pending:
            # A thread that comes back from native code while Python shuts down aborts the process, so it
            # must come back before: the call goes to the group's own manager, and fails when its connection
            # does.
            host, _, port = self._manager_address().rpartition(":")
            MeshSockets.find(-1, {(host.strip("[]"), int(port))}).cut()
        super().shutdown(wait=False)
        if wait:
            self._executor.join(_LONGEST_JOIN_S)

    def _manager_address(self) -> str:
        address: str = self._store.get(MANAGER_ADDR_KEY).decode()
        return address.removeprefix("http://").rstrip("/")

    @property
    def quorum_pending(self) -> bool:
        """Whether a quorum was asked for and has not come."""
        return self._quorum_future is not None and not self._quorum_future.done()

    @property
    def quorum_id(self) -> int:
        """The quorum that this replica is in; -1 before the first."""
        return int(self._quorum_id)

    def wait_quorum(self) -> None:
        """Wait for the quorum, and for the state of a donor where this group is behind.

        Raises:
            QuorumError: A donor gave a part of its state before, and nobody is left to give the rest.
        """
        super().wait_quorum()
        if self.torn and not self._healing and self.errored() is None:
            raise QuorumError(
                "a heal ended half-way, and nobody is ahead of this group any more: its parameters are of no step",
                hint="it starts anew, from the last checkpoint where there is one",
            )

    @property
    def torn(self) -> bool:
        """Whether the parameters of this process are of no step: partly a donor's, or not those of its own rank's."""
        return self._transport.torn

    def take_back_heal(self, step: int) -> None:
        """Go back to ``step``, for another rank of this group did not get the state that this one got."""
        self._transport.torn = True
        self.load_state_dict({**self.state_dict(), "step": step})

    def give(self, source: Source) -> None:
        """What groups that heal are given.

        Raises:
            CheckpointError: It holds something that cannot be handed over.
        """
        if isinstance(self._transport, StripedTransport):
            self._transport.serve(source)

    def keep_up(self, names: Sequence[str]) -> None:
        """Let nobody wait for this process while it heals, where its transport can do that.

        Args:
            names: Of the parameters, in the order of the optimizer.
        """
        if isinstance(self._transport, StripedTransport):
            self._transport.keep_up(names)

    def arrived(self) -> None:
        """Tell who heals from this process that its gradients are there."""
        if isinstance(self._transport, StripedTransport):
            self._transport.arrived()

    def take_heal(self) -> Heal | None:
        """The state that was received from a donor since the last call, if any."""
        return self._transport.take_heal()

    def forget_quorum(self) -> None:
        """Drop a quorum that came or failed: TorchFT would raise a failure again at each new request."""
        if not self.quorum_pending:
            self._quorum_future = None

    def forget_votes(self) -> None:
        """Drop failed votes: what comes next is not a retry of them, and needs no new mesh."""
        self._commit_failures = 0


class _Listening:
    """The client of the group's manager; what it says of a quorum is heard here before TorchFT acts on it."""

    def __init__(self, client: Any, heard: Callable[[Any], None]) -> None:
        self._client, self._heard = client, heard

    def _quorum(self, **question: Any) -> Any:
        quorum = self._client._quorum(**question)
        self._heard(quorum)
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _ThroughTunnel:
    """The client of the group's manager; TorchFT dials the donor's by itself, right after the quorum names it."""

    def __init__(self, client: Any, tunnel: Tunnel) -> None:
        self._client, self._tunnel = client, tunnel

    def _quorum(self, **question: Any) -> Any:
        quorum = self._client._quorum(**question)
        if quorum.heal:
            try:
                self._tunnel.reach("manager", [urlsplit(quorum.recover_src_manager_address).netloc])
            except ConnectionError as error:
                # The heal will fail, which the vote knows how to say; raised here it would end the process.
                logger.warning("the donor's manager: %s", error)
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _DaemonExecutor(Executor):
    """One thread that does what is submitted, in order, and that Python does not wait for at exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        self._tasks.put(None)
        if wait:
            self._thread.join()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits for the future
                future.set_exception(error)


class _OneLine(logging.Filter):
    """A peer's death is no failure of this process: one line instead of a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if "flight recorder" in record.getMessage():
            return False
        record.exc_info = record.exc_text = None
        record.msg, record.args = record.getMessage().strip().split("\n", 1)[0], ()
        record.levelno, record.levelname = logging.INFO, "INFO"
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)


def quiet_torchft() -> None:
    """Reduce TorchFT's logging to one INFO line a failure; the session reports failures itself."""
    # Healing reads tensors out of bytes that nothing else holds; see PrivateHTTPTransport for the small ones.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    for name in ("torchft.manager", "torchft.process_group", "torchft.futures"):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _OneLine) for item in logger.filters):
            logger.addFilter(_OneLine())
