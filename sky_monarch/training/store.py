r"""The store helper: serves torch's TCPStore on listening sockets that the agent owns.

``python -m sky_monarch.training.store``, started by an agent when the first rank connects to its
``MASTER_PORT``. File descriptor 3 is a unix ``SOCK_SEQPACKET`` socket, one message a packet:

    agent  ▶ ``open <id>\\n`` with one listening TCP socket attached     helper ▶ ``ready <id>\\n`` or
    ``error <id> <text>\\n`` agent  ▶ ``close <id>\\n``                                            helper ▶
    ``ready <id>\\n`` or ``error <id> <text>\\n``

The end of the connection ends the helper. The listening sockets are the agent's, so a rank that connects
before the helper runs waits in the kernel's backlog, and a helper that dies can be replaced.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

__all__ = ["StoreHelper", "main"]

CONTROL_FD = 3
_MESSAGE_BYTES = 4096
_MOST_FDS = 4
_MOST_STORES = 1024


class StoreHelper:
    """The stores that are being served, by the agent's id."""

    def __init__(self) -> None:
        self._stores: dict[str, Any] = {}

    def handle(self, message: str, fds: list[int]) -> str:
        """Carry out one message, and answer it. Every descriptor is either handed to a store or closed."""
        verb, _, rest = message.strip().partition(" ")
        name = rest.strip()
        try:
            if not name or " " in name:
                raise ValueError(f"{verb!r} needs one id")
            if verb == "open":
                self._open(name, fds)
            elif verb == "close":
                self._stores.pop(name)
            else:
                raise ValueError(f"unknown verb {verb!r}")
        except KeyError:
            return f"error {name} no store of this id is open\n"
        except Exception as error:  # noqa: BLE001  # the agent must hear of whatever it was
            return f"error {name or '-'} {' '.join(str(error).split())}\n"[:_MESSAGE_BYTES]
        finally:
            for fd in fds:
                os.close(fd)
        return f"ready {name}\n"

    def _open(self, name: str, fds: list[int]) -> None:
        if name in self._stores:
            raise ValueError(f"store {name} is open already")
        if len(self._stores) >= _MOST_STORES:
            raise ValueError(f"{_MOST_STORES} stores are open")
        if len(fds) != 1:
            raise ValueError(f"expected one socket, got {len(fds)}")
        with socket.socket(fileno=os.dup(fds[0])) as listener:
            if listener.family not in (socket.AF_INET, socket.AF_INET6) or not listener.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                raise ValueError("the socket is no listening TCP socket")
            host, port = listener.getsockname()[:2]
        from torch.distributed import TCPStore  # seconds; later messages find it imported

        # The store closes the descriptor that it is given when it ends.
        self._stores[name] = TCPStore(
            "127.0.0.1" if host in ("0.0.0.0", "::") else host,  # noqa: S104  # compared, not bound
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(fds[0]),
        )


def main() -> int:
    """Serve until the agent closes its end; returns the exit code."""
    try:
        control = socket.socket(fileno=CONTROL_FD)
        if control.family != socket.AF_UNIX or control.type != socket.SOCK_SEQPACKET:
            raise OSError(f"it is of another kind: {control}")
    except OSError as error:
        sys.stderr.write(f"error: file descriptor {CONTROL_FD} is no SOCK_SEQPACKET unix socket: {error}\n")
        sys.stderr.write("hint: this helper is started by the agent\n")
        return 2
    control.set_inheritable(False)
    helper = StoreHelper()
    with control, contextlib.suppress(ConnectionError):
        while True:
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_FDS)
            if not data:
                break
            control.sendall(helper.handle(data.decode(errors="replace"), fds).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
