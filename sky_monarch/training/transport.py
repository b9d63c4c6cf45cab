"""Handing a replica's state to one that heals: TorchFT's HTTP transport, behind the run's secret.

TorchFT's own listens on every interface, advertises the host's name (which need not resolve), asks for no
credentials, and unpickles what it gets. This one listens on the session's address, and both sides prove
that they know the run's token before a byte is decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch.utils._pytree import tree_map_only
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._rwlock import RWLock
from torchft.checkpointing._serialization import _streaming_load, _streaming_save

from sky_monarch.training.tunnel import Tunnel

__all__ = ["Heal", "Healing", "PrivateHTTPTransport"]

logger = logging.getLogger(__name__)

_REQUEST_HEADER = "X-Sky-Monarch-Proof"
_ANSWER_HEADER = "X-Sky-Monarch-Answer"
_DONOR_HEADER = "X-Sky-Monarch-Replica"
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Heal:
    """One transfer of a donor's state to this process.

    Attributes:
        at_s: When all of it was there, on the monotonic clock.
        took_s: How long it took.
        bytes: How many bytes it was.
        donor: Replica group that gave it; None where it did not say.
        step: Step of the state.
    """

    at_s: float
    took_s: float
    bytes: int
    donor: int | None
    step: int

    def metrics(self, round_steps: int = 1, *, most: int | None = None) -> dict[str, float]:
        """As the agent expects it among the metrics of the first commit.

        Args:
            round_steps: Steps that the donor counted as one.
            most: Steps that it can have been at, where its last round was a shorter one.
        """
        numbers = {"at_s": self.at_s, "took_s": self.took_s, "bytes": self.bytes, "donor": self.donor}
        step = self.step * round_steps
        numbers["step"] = step if most is None else min(step, most)
        return {f"heal_{name}": float(value) for name, value in numbers.items() if value is not None}


class Healing(Protocol):
    """What a session asks of its transport beside what TorchFT does.

    Attributes:
        torn: Whether this process's parameters are partly a donor's: they are of no step then.
    """

    torn: bool

    def take_heal(self) -> Heal | None:
        """The last state that this process received, once; None where there was none since."""


class _Counted:
    """A stream that knows how much was read from it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self.bytes += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self.bytes += count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrivateHTTPTransport(HTTPTransport[Any]):  # type: ignore[misc]  # torchft has no type information
    """Serves ``GET /checkpoint/<step>/full`` to those who know ``token``.

    Args:
        replica: This replica group, which joiners are told.
        token: The run's secret; it is never sent, only proofs made with it.
        address: Numeric address to listen on and to advertise.
        timeout: For one request.
        tunnel: The way to donors on other hosts, where these do not reach each other by themselves.
    """

    def __init__(
        self, *, replica: int, token: str, address: str, timeout: timedelta, tunnel: Tunnel | None = None
    ) -> None:
        # HTTPTransport's constructor opens its server at once; the state that its other methods use is set
        # up here.
        self._checkpoint_lock = RWLock(timeout=timeout.total_seconds())
        self._disallowed = False
        self._step = -1
        self._timeout = timeout
        self._state_dict = None
        self._num_chunks = 0
        self._spec = None
        self._chunks = None
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._stream = None if accelerator is None else torch.Stream(accelerator)
        self._key = token.encode()
        self.replica = replica
        self._tunnel = tunnel
        self._heal: Heal | None = None
        self.torn = False  # what is received lies beside the parameters until all of it is there
        self.disallow_checkpoint()

        self._server = _Server((address, 0), self)
        self._thread = threading.Thread(target=self._serve, name="donor", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Where a joiner finds this donor; the step is appended to it."""
        host = self._server.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/checkpoint/"

    def take_heal(self) -> Heal | None:
        """The last transfer that this process received, once; None where there was none since."""
        heal, self._heal = self._heal, None
        return heal

    def proof(self, purpose: str, nonce: str, path: str) -> str:
        """What only a holder of the token can compute for this request."""
        return hmac.new(self._key, f"{purpose}\n{nonce}\n{path}".encode(), hashlib.sha256).hexdigest()

    def recv_checkpoint(
        self,
        src_rank: int,  # noqa: ARG002
        metadata: str,
        step: int,
        timeout: timedelta,
    ) -> Any:
        """Fetch the state of ``step`` from the donor at ``metadata``.

        Raises:
            PermissionError: The donor could not prove that it belongs to this run; nothing was decoded.
            OSError: It could not be reached, or refused.
        """
        began_s = time.monotonic()
        path = f"/checkpoint/{step}/full"
        nonce = secrets.token_hex(_NONCE_BYTES)
        if not metadata.startswith("http://"):
            raise PermissionError(f"not an address of a donor: {metadata!r}")
        if self._tunnel is not None:
            self._tunnel.reach("state", [urlsplit(metadata).netloc])
        request = urllib.request.Request(  # noqa: S310  # the scheme is checked above
            f"{metadata}{step}/full", headers={_REQUEST_HEADER: f"{nonce} {self.proof('ask', nonce, path)}"}
        )
        # No proxy: the donor's address is of this run, whatever http_proxy says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout.total_seconds()) as response:
            answer = response.headers.get(_ANSWER_HEADER, "")
            if not hmac.compare_digest(answer, self.proof("answer", nonce, path)):
                raise PermissionError(f"the donor at {metadata} does not belong to this run")
            counted = _Counted(response)
            state = _streaming_load(counted, weights_only=False)
            donor = response.headers.get(_DONOR_HEADER, "")
        at_s = time.monotonic()
        self._heal = Heal(
            at_s=at_s,
            took_s=at_s - began_s,
            bytes=counted.bytes,
            donor=int(donor) if donor.isdecimal() else None,
            step=step,
        )
        # Loaded tensors live in `bytes`. Python shares those of one byte between all their users: not to be
        # written to.
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if tensor.nbytes <= 1 else tensor, state
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], transport: PrivateHTTPTransport) -> None:
        self.transport = transport
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # http.server's own looks the host's name up, which may take seconds where it does not resolve.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.info("a joiner at %s went away", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.transport._timeout.total_seconds())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        logger.debug(format, *args)

    def do_GET(self) -> None:
        transport = self.server.transport
        nonce, _, proof = self.headers.get(_REQUEST_HEADER, "").partition(" ")
        if len(nonce) != 2 * _NONCE_BYTES or not hmac.compare_digest(
            proof, transport.proof("ask", nonce, self.path)
        ):
            self.send_error(403)
            return
        with transport._checkpoint_lock.r_lock():
            if self.path != f"/checkpoint/{transport._step}/full":
                self.send_error(404, f"this donor serves step {transport._step}")
                return
            self.send_response(200)
            self.send_header("Content-type", "application/octet-stream")
            self.send_header(_ANSWER_HEADER, transport.proof("answer", nonce, self.path))
            self.send_header(_DONOR_HEADER, str(transport.replica))
            self.end_headers()
            _streaming_save(transport._state_dict, self.wfile)
