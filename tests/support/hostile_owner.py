"""An owner that knows the secret and lies: the wire format, written down a second time."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable

MAGIC = b"SKYR\x02"
REQUEST = struct.Struct("<BBQQQQQ")
PIECE = 1 << 20  # of what is as short as the tests have it
READ, DIGEST, LOOKUP = 1, 6, 7


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("hung up")
        data += part
    return data


class HostileOwner:
    """Answers each read as ``lie`` has it.

    Args:
        secret: Of the run.
        nbytes: What the handle says.
        lie: ``wrong`` bytes with a digest that suits them, a ``digest`` that does not suit, ``longer`` than
            asked for, ``endless``: never the whole, byte by byte; ``silent``; ``stranger``: cannot prove the
            secret; ``garbage`` in place of an answer.
        claim: What it announces to those who look its state up.
    """

    def __init__(
        self, secret: str, nbytes: int, lie: str, claim: Callable[[str], bytes] | None = None
    ) -> None:
        self.secret, self.nbytes, self.lie, self.claim = secret.encode(), nbytes, lie, claim
        self.reads = 0
        crc64_of_zeros(PIECE)  # ahead: who is too slow is found out for that
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closing = threading.Event()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def handle(self, *, epoch: int = 1) -> str:
        return json.dumps(
            {"address": self.address, "length": self.nbytes, "access": "read", "epoch": epoch, "token": 7}
        )

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._one, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _one(self, connection: socket.socket) -> None:
        try:
            self._greet(connection)
            while True:
                self._answer(connection, REQUEST.unpack(receive(connection, REQUEST.size)))
        except OSError:
            connection.close()

    def _proof(self, side: bytes, theirs: bytes, ours: bytes) -> bytes:
        return hmac.new(self.secret, MAGIC + side + theirs + ours, hashlib.sha256).digest()

    def _greet(self, connection: socket.socket) -> None:
        hello = receive(connection, len(MAGIC) + 32)
        theirs, ours = hello[len(MAGIC) :], os.urandom(32)
        proof = os.urandom(32) if self.lie == "stranger" else self._proof(b"owner", theirs, ours)
        connection.sendall(MAGIC + ours + proof)
        assert hmac.compare_digest(receive(connection, 32), self._proof(b"requester", theirs, ours))
        connection.sendall(struct.pack("<IBQ16s16sQ", os.getpid(), 0, 0, bytes(16), bytes(16), 0))

    def _answer(self, connection: socket.socket, request: tuple[int, ...]) -> None:
        op, _, _, _, _, length, _ = request
        yes = lambda value: b"\0" + struct.pack("<Q", value)  # noqa: E731
        if op == LOOKUP:
            claimed = self.claim(receive(connection, length).decode()) if self.claim else b""
            connection.sendall(yes(len(claimed)) + claimed)
            return
        self.reads += op == READ
        if self.lie == "silent":
            self._closing.wait(60)
        elif self.lie == "garbage":
            connection.sendall(b"\xff" * 4096)
        elif self.lie == "longer":
            connection.sendall(yes(length + 1) + bytes(length + 1) + yes(0))
        elif self.lie == "endless":
            connection.sendall(yes(length))
            while not self._closing.wait(0.05):
                connection.sendall(b"\0")
        elif op == DIGEST:
            connection.sendall(yes(0))
        else:
            zeros = bytes(length)
            connection.sendall(yes(length) + zeros + yes(crc64_of_zeros(length) ^ (self.lie == "digest")))


@functools.cache
def crc64_of_zeros(length: int) -> int:
    """NVMe's."""
    register = _ONES
    for _ in range(length):
        register = _TABLE[register & 0xFF] ^ (register >> 8)
    return register ^ _ONES


def _entry(index: int) -> int:
    for _ in range(8):
        index = (index >> 1) ^ (0x9A6C9329AC4BC9B5 if index & 1 else 0)
    return index


_ONES = (1 << 64) - 1
_TABLE = [_entry(index) for index in range(256)]
