"""The session's connection to its agent."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self


class AgentClient:
    """Tells the agent how far this rank is, and hears what the agent wants.

    Reports never wait and are state, not a log: the latest one wins, and after a lost connection is back the
    latest is said again. Does not survive a fork; each call then raises ``ChannelClosedError``.
    """

    def __init__(
        self,
        address: str,
        token: str,
        run_id: str,
        *,
        replica: int,
        rank: int,
        generation: int,
        target_step: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Dial the agent.

        Args:
            address: Where it listens, ``unix:<absolute path>``.
            token: Secret of the run.
            run_id: The run.
            replica: Replica group of this process.
            rank: Rank inside the group.
            generation: Generation this process was started as.
            target_step: Step at which the work is done; None where that is not known.
            timeout_s: Longest wait for an agent that is not there yet.

        Raises:
            ConfigError: The address cannot be used.
            PeerRefusedError: The agent does not want this session; the message says why.
            ChannelTimeoutError: No agent within ``timeout_s``.
        """
        from sky_monarch import _core

        self._core = _core.AgentClient(
            address, token, run_id, replica, rank, generation, target_step, timeout_s
        )
        # Also when the interpreter ends: a script that reports its last step and exits must have said so.
        weakref.finalize(self, self._core.close)

    @classmethod
    def from_env(cls, *, target_step: int | None = None, timeout_s: float = 30.0) -> Self:
        """Dial the agent that started this process, as its environment says.

        Raises:
            ConfigError: This process was not started by an agent (a variable is missing or is no number).
            PeerRefusedError: The agent does not want this session.
            ChannelTimeoutError: No agent within ``timeout_s``.
        """
        try:
            address, token = os.environ["SKY_MONARCH_AGENT"], os.environ["SKY_MONARCH_TOKEN"]
            run_id = os.environ["SKY_MONARCH_RUN_ID"]
            numbers = {
                name.lower(): int(os.environ[f"SKY_MONARCH_{name}"])
                for name in ("REPLICA", "RANK", "GENERATION")
            }
        except KeyError as missing:
            raise ConfigError(
                f"{missing.args[0]} is not set: no agent started this process",
                hint="start it with `sky-monarch up`",
            ) from None
        except ValueError as error:
            raise ConfigError(f"a SKY_MONARCH_ variable is no number: {error}") from None
        return cls(address, token, run_id, **numbers, target_step=target_step, timeout_s=timeout_s)

    def committed(
        self,
        step: int,
        *,
        quorum_id: int | None = None,
        participants: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Report a committed step; never waits.

        Args:
            step: Steps committed so far.
            quorum_id: Quorum in which it was committed.
            participants: Replica groups that took part.
            metrics: Whatever else was measured: ``loss``, ``lr``, ``tokens_per_s``…

        Raises:
            ChannelClosedError: This client was closed.
            PeerRefusedError: An agent has refused this session since (a newer generation took its place).
        """
        self._core.committed(step, quorum_id, participants, metrics)

    def done(self, step: int) -> None:
        """Report that the target step is committed; never waits. Raises as ``committed``."""
        self._core.done(step)

    def pause(self, what: str, limit_s: float) -> None:
        """Expect no commit for ``limit_s`` seconds (0 ends the pause). Raises as ``committed``."""
        self._core.pause(what, limit_s)

    def recv(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait for the agent's next command.

        Returns:
            A dict with a ``type``: ``drain``, ``inject``, ``release`` or ``dead``; None after ``timeout_s``
            seconds.

        Raises:
            ChannelClosedError: This client was closed.
            PeerRefusedError: An agent has refused this session since.
        """
        return self._core.recv(timeout_s)

    def close(self) -> None:
        """Let the last reports leave (3 s at most) and hang up. Does nothing the second time."""
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
