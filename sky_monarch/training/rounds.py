"""Asking for quorums, waiting for them, and counting the votes that came to nothing."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from datetime import timedelta

from sky_monarch.errors import QuorumError, QuorumTimeoutError
from sky_monarch.training.drain import Drain
from sky_monarch.training.manager import SessionManager
from sky_monarch.training.timeouts import Timeouts

__all__ = ["Rounds"]

logger = logging.getLogger(__name__)

# Failed votes in a row: from the third on the session waits before it asks again; at the last it gives up.
_PATIENT_FAILURES, _MOST_FAILURES = 3, 100
_LONGEST_BACKOFF_S = 1.0
# A healthy replica must outlive the one that it waits for: the watchdog replaces that one meanwhile. So often it asks
# for a late quorum where nobody watches over the run.
_QUORUM_TRIES = 3
# Where an agent does, it waits for as long as its run may take to find new hosts: to exit and start again would bring
# no member that is missing, and cost the budget of a group that has done nothing. The run's end, its budget and the
# agent's lease end that wait sooner; this ends it where all of them fail.
_LONGEST_WAIT_S = 24 * 3600.0


class Rounds:
    """The quorums of a session, one after the other.

    Args:
        manager: Asks for them.
        timeouts: Longest waits.
        drain: Ends a wait.
        before: Called before each quorum is asked for: what is asked of donors after it must be ready.
        late: Called where a quorum is late; whether somebody else sees to it that members come.
    """

    def __init__(
        self,
        manager: SessionManager,
        timeouts: Timeouts,
        drain: Drain,
        *,
        before: Callable[[], None],
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._manager, self._timeouts, self._drain, self._before = manager, timeouts, drain, before
        self._late = late
        self._failures = 0

    def ask(self) -> None:
        """Ask for a quorum; it comes in another thread."""
        if self._failures > _PATIENT_FAILURES:
            time.sleep(min(_LONGEST_BACKOFF_S, 0.02 * 2 ** min(self._failures - _PATIENT_FAILURES, 10)))
        self._before()
        first = self._manager.quorum_id < 0
        limit_s = self._timeouts.first_quorum_s if first else self._timeouts.quorum_s
        self._manager.start_quorum(timeout=timedelta(seconds=limit_s))

    def wait(self) -> None:
        """Wait for the quorum; one that is late is asked for again: others are at fault, or on their way.

        Raises:
            QuorumTimeoutError: It did not come, however often or long.
            QuorumError: The lighthouse cannot be reached.
            SystemExit: This process was asked to leave.
        """
        began_s = time.monotonic()
        for attempt in itertools.count(1):
            try:
                with self._drain.interruptible():
                    self._manager.wait_quorum()
            except TimeoutError as error:
                waited_s, attended = time.monotonic() - began_s, self._late()
                if (attempt >= _QUORUM_TRIES and not attended) or waited_s > _LONGEST_WAIT_S:
                    raise QuorumTimeoutError(
                        f"no quorum came: {error}",
                        hint="another replica is stuck, or fewer than min_replicas are up",
                    ) from error
                logger.warning("no quorum within %.0f s; asking again", waited_s)
                self._manager.forget_quorum()
                self.ask()
            except RuntimeError as error:
                raise QuorumError(f"the lighthouse gave no quorum: {error}", hint="is it up?") from error
            else:
                return

    def passed(self) -> None:
        """The vote was yes."""
        self._failures = 0

    def failed(self, step: int) -> None:
        """The vote on ``step`` was no.

        Raises:
            QuorumError: Once too often in a row.
        """
        self._failures += 1
        error = self._manager.errored()
        cause = error.original_exception if error is not None else "too few replicas"
        logger.info("step %d was not committed: %s", step, str(cause).split("\n", 1)[0])
        if self._failures >= _MOST_FAILURES:
            raise QuorumError(
                f"nothing was committed in {self._failures} attempts; the last failed with: {cause}"
            )
