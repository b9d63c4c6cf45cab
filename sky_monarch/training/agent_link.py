"""The session's side of the channel to its agent: reports out, orders in, never in the way of a step."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from sky_monarch import stacks
from sky_monarch.errors import ChannelClosedError, ChannelError, PeerRefusedError
from sky_monarch.training.environment import RankEnvironment

__all__ = ["AgentLink"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_POLL_S = 0.5
_JOIN_S = 2.0
# The agent's word on why to leave follows its signal, or is just ahead of it.
_WORD_S = 0.5
# The controller's word on whether others stay comes after its agent's, through a journal and back.
_WHO_SAVES_S = 3.0
# Of the time that it leaves, for the end of this process.
_EXIT_S = 1.0
# A wait for other groups is told after the first; each telling holds the watchdog off for the second.
_PATIENCE_S, _EXCUSE_S = 1.0, 3.0
# What an out-of-memory rehearsal may still allocate before Python has to raise MemoryError.
_OOM_HEADROOM_BYTES = 64 * 1024 * 1024


class _Client(Protocol):
    """What is used of :class:`sky_monarch.actors.agent_client.AgentClient`."""

    def committed(
        self,
        step: int,
        *,
        quorum_id: int | None = None,
        participants: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None: ...
    def done(self, step: int) -> None: ...
    def pause(self, what: str, limit_s: float) -> None: ...
    def recv(self, timeout_s: float) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


class AgentLink:
    """A connection to the agent, or the lack of one: without an agent every report is dropped.

    Args:
        env: Names the agent and this rank.
        target_step: Told to the agent, so that it knows an early exit from a finished job.
        on_dead: Called with a quorum id, from the link's thread: a member of every quorum up to it is dead.
        wait_limits_s: How long one wait for other groups excuses this one: before the first commit, and after.

    Raises:
        PeerRefusedError: The agent has a newer generation of this group: this process must end.
    """

    def __init__(
        self,
        env: RankEnvironment,
        *,
        target_step: int | None,
        on_dead: Callable[[int], None],
        wait_limits_s: tuple[float, float],
    ) -> None:
        self.released = threading.Event()
        stacks.register()
        self._on_dead = on_dead
        self._oom_wanted = False
        self._told_to_leave, self._save_until = threading.Event(), 0.0
        self._told_who_saves, self._is_saver = threading.Event(), False
        self._lock = threading.Lock()
        self._waiting_since: float | None = None
        self._waited_s = 0.0
        self._committed_s: float | None = None
        self._wait_limit_s, self._later_limit_s = wait_limits_s
        self._pauses: list[
            tuple[str, float]
        ] = []  # those that are entered, the innermost last, and until when
        self._paused = False
        self._last: tuple[int, int, int, Mapping[str, float]] | None = None
        self._closed = threading.Event()
        self._client = self._connect(env, target_step)
        self._refusal: PeerRefusedError | None = None
        self._thread: threading.Thread | None = None
        if self._client is not None:
            self._thread = threading.Thread(
                target=self._listen, args=(self._client,), name="agent-link", daemon=True
            )
            self._thread.start()

    @staticmethod
    def _connect(env: RankEnvironment, target_step: int | None) -> _Client | None:
        if env.agent is None:
            return None
        from sky_monarch.actors.agent_client import (
            AgentClient,
        )  # needs _core, which a lone recipe does without

        try:
            client: _Client = AgentClient(
                address=env.agent.address,
                token=env.agent.token,
                run_id=env.agent.run_id,
                replica=env.replica,
                rank=env.rank,
                generation=env.generation,
                target_step=target_step,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        except PeerRefusedError:
            raise
        except ChannelError as error:
            logger.warning("no connection to the agent: it will not see this rank's progress: %s", error)
            return None
        return client

    @property
    def connected(self) -> bool:
        """Whether an agent is there to release this rank."""
        return self._client is not None

    def committed(self, step: int, quorum_id: int, participants: int, metrics: Mapping[str, float]) -> None:
        """Report a committed step, and what of it this rank has spent on its own work (``busy_s``)."""
        now_s = time.monotonic()
        if self._committed_s is not None:
            metrics = {**metrics, "busy_s": max(0.0, now_s - self._committed_s - self._waited_s)}
        self._committed_s, self._waited_s = now_s, 0.0
        self._report(step, quorum_id, participants, metrics)

    def _report(self, step: int, quorum_id: int, participants: int, metrics: Mapping[str, float]) -> None:
        self._wait_limit_s = self._later_limit_s
        with self._lock:
            self._paused = False  # to the agent a commit ends whatever pause there was
        self._last = (step, quorum_id, participants, metrics)
        self._tell(
            lambda client: client.committed(
                step, quorum_id=quorum_id, participants=participants, metrics=metrics
            )
        )

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last commit, where no further one would tell them."""
        if self._last is not None and metrics.items() - self._last[3].items():
            self._report(*self._last[:3], {**self._last[3], **metrics})

    def done(self, step: int) -> None:
        """Report that the work is done: the agent releases this rank when nobody needs it any more."""
        self._tell(lambda client: client.done(step))

    @contextlib.contextmanager
    def pause(self, what: str, limit_s: float) -> Iterator[None]:
        """Report that no commit is to be expected for ``limit_s``, and the end of that.

        One inside of another takes nothing from it: the later of both limits holds, and at its end what is left of the
        outer one does.
        """
        with self._lock:
            outer_s = max((until_s for _, until_s in self._pauses), default=0.0)
            pause = (what, max(outer_s, time.monotonic() + limit_s))
            self._pauses.append(pause)
            self._tell_pause(*pause)
        try:
            yield
        finally:
            with self._lock:
                self._pauses = [one for one in self._pauses if one is not pause]
                self._tell_pause(*(self._pauses[-1] if self._pauses else (what, 0.0)))

    def _tell_pause(self, what: str, until_s: float) -> None:
        left_s = max(0.0, until_s - time.monotonic())
        self._paused = left_s > 0
        self._tell(lambda client: client.pause(what, left_s))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for others: the watchdog must find the one that hangs, not those that wait for it.

        The link's thread keeps telling the agent while this lasts. A process that is stopped, or stuck with
        the interpreter's lock, tells nothing; and what hangs outside of such a wait is not in one. What hangs
        inside of one says the same as who waits, but no wait outlasts the timeouts of what it waits for: after
        that it is no excuse any more.
        """
        began = self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waiting_since = None
            self._waited_s += time.monotonic() - began

    def wait_on(self) -> bool:
        """A quorum is late, and is about to be asked for again.

        That this process got its answer in time, and asks once more, shows that it does not hang: its excuse counts
        anew.

        Returns:
            Whether there is an agent. It ends this process where nobody is waited for any more.
        """
        with self._lock:
            if self._waiting_since is not None:
                self._waiting_since = time.monotonic()
        return self._client is not None and self._refusal is None

    def _excuse(self, client: _Client) -> None:
        with self._lock:
            since = self._waiting_since
            if since is None or self._paused:
                return
            if _PATIENCE_S < time.monotonic() - since < self._wait_limit_s:
                client.pause("waiting for other replica groups", _EXCUSE_S)

    def time_to_save(self) -> float:
        """Seconds for saving the state, for who was asked to leave since the host is about to be taken away."""
        if self._client is None or not self._told_to_leave.wait(_WORD_S):
            return 0.0
        return max(0.0, self._save_until - _EXIT_S - time.monotonic())

    def time_if_last(self, limit_s: float, *, otherwise: bool) -> float:
        """The same for who need not save where others stay that have the state.

        Args:
            limit_s: Seconds that there are.
            otherwise: What holds where nobody says so in time: a controller may be away.
        """
        until = time.monotonic() + limit_s
        told = self._told_who_saves.wait(min(_WHO_SAVES_S, limit_s / 4))
        saves = self._is_saver if told else otherwise
        return max(0.0, until - time.monotonic()) if saves else 0.0

    def leave(self, limit_s: float) -> None:
        """Report that this rank asks for no quorum any more: the others need not wait while it saves its state."""
        self._tell(lambda client: client.pause("leaving the quorum", limit_s))

    def close(self) -> None:
        """Say goodbye; idempotent."""
        self._closed.set()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)  # a thread inside native code must be back before Python shuts down

    def _tell(self, report: Callable[[_Client], None]) -> None:
        client = self._client
        if client is None:
            return
        with contextlib.suppress(ChannelClosedError):
            report(client)

    def _listen(self, client: _Client) -> None:
        while not self._closed.is_set():
            try:
                self._excuse(client)
                command = client.recv(_POLL_S)
            except PeerRefusedError as error:
                self._refusal = error  # a newer generation took this one's place: check() ends it
                self.released.set()
                return
            except ChannelClosedError:
                return
            if command is not None:
                self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        match command.get("type"):
            case "dead":
                self._on_dead(int(command["quorum_id"]))
            case "release":
                self.released.set()
            case "drain":
                if command.get("save"):
                    self._save_until = time.monotonic() + float(command["grace_s"])
                self._told_to_leave.set()
                # One path for both ways of asking: the session's handler runs in the main thread, as for a
                # real SIGTERM.
                os.kill(os.getpid(), signal.SIGTERM)
            case "who_saves":
                self._is_saver = bool(command.get("is_you"))
                self._told_who_saves.set()
            case "inject" if command.get("fault") == "exit":
                sys.stderr.write("sky-monarch: rehearsing a fault: exit with code 1\n")
                sys.stderr.flush()
                os._exit(1)
            case "inject" if command.get("fault") == "oom":
                self._oom_wanted = True
            case unknown:
                logger.info("ignored an unknown command of the agent: %s", unknown)

    def check(self) -> None:
        """Do what the agent wants of the main thread; called once or twice a step.

        Raises:
            PeerRefusedError: A newer generation took this one's place.
            MemoryError: An out-of-memory was asked for: the address space was capped and filled until
                Python gave up.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._oom_wanted:
            return
        self._oom_wanted = False
        sys.stderr.write("sky-monarch: rehearsing a fault: out of memory\n")
        sys.stderr.flush()
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + _OOM_HEADROOM_BYTES, before[1]))
        hoard = []
        try:
            while True:
                hoard.append(bytearray(_OOM_HEADROOM_BYTES // 8))
        finally:
            hoard.clear()
            resource.setrlimit(resource.RLIMIT_AS, before)
