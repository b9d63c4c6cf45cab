"""A supervisor's line to our lighthouse."""

from __future__ import annotations

import json
from typing import Any


class LighthouseControl:
    """Tells our lighthouse who died. Dials with the first call, and anew where the line broke."""

    def __init__(self, address: str, *, token: str, run_id: str) -> None:
        """Nothing is dialled yet.

        Args:
            address: Control channel of the lighthouse, ``unix:<absolute path>``.
            token: Secret of the run.
            run_id: The run.

        Raises:
            ConfigError: The address cannot be used.
        """
        from sky_monarch import _core

        self._core = _core.LighthouseControl(address, token, run_id)

    def evict(self, replica: int, generation: int, *, timeout_s: float = 10.0) -> int | None:
        """Take every generation of ``replica`` up to ``generation`` out of the quorum, for good.

        Args:
            replica: Replica group.
            generation: Newest generation that is over.
            timeout_s: Longest wait, in seconds, tries at a lighthouse that is down included.

        Returns:
            Id of the last quorum that held one of them; None where no quorum did.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``. To repeat it is harmless.
            PeerRefusedError: The token or the run is another's.
        """
        return self._core.evict(replica, generation, timeout_s)

    def expect(self, replicas: int, *, timeout_s: float = 10.0) -> None:
        """Let a start wait for so many replica groups from now on, after a restart of the lighthouse too.

        Args:
            replicas: Of the run.
            timeout_s: Longest wait, in seconds, tries at a lighthouse that is down included.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``. To repeat it is harmless.
            PeerRefusedError: The token or the run is another's.
        """
        self._core.expect(replicas, timeout_s)

    def state(self, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Everything the lighthouse knows, as in its ``/status.json`` under ``lighthouse``.

        Args:
            timeout_s: Longest wait, in seconds.

        Raises:
            ChannelTimeoutError: No answer within ``timeout_s``.
            PeerRefusedError: The token or the run is another's.
        """
        state: dict[str, Any] = json.loads(self._core.state(timeout_s))
        return state
