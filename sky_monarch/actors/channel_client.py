"""A connection that says whatever it is told to: for simulated agents, and for hostile ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self


class ChannelClient:
    """One dialled channel. Messages are not checked, and a lost connection is not dialled again."""

    def __init__(
        self,
        address: str,
        token: str,
        run_id: str,
        hello: Mapping[str, Any],
        timeout_s: float = 5.0,
        *,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """Dial ``address`` and say ``hello``.

        Args:
            address: Where the peer listens, ``unix:<absolute path>`` or ``tls:<host>:<port>``.
            token: Secret of the run.
            run_id: The run.
            hello: Who dials, as ``protocol.rs`` has it: ``{"role": "agent", "host": ...}``.
            timeout_s: Longest wait for the answer.
            identity: This side's certificate, for TLS.

        Raises:
            ConfigError: The address, ``hello`` or the certificate cannot be used.
            PeerRefusedError: The peer does not want us.
            ChannelClosedError: Nobody listens.
            ChannelTimeoutError: Nobody answers.
        """
        from sky_monarch import _core

        self._core = _core.ChannelClient(address, token, run_id, hello, timeout_s, identity)

    def send(self, message: object) -> None:
        """Send anything that msgpack can hold.

        Raises:
            ChannelClosedError: The connection is gone.
            ChannelTimeoutError: The peer does not keep up.
            FrameTooLargeError: It exceeds the bound of a frame.
        """
        self._core.send(message)

    def recv(self, timeout_s: float) -> Any:
        """Wait for the next message; None after ``timeout_s``.

        Raises:
            ChannelClosedError: The connection is gone and everything was received.
        """
        return self._core.recv(timeout_s)

    def close(self) -> None:
        """Hang up, after what is queued (2 s at most). Does nothing the second time."""
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
