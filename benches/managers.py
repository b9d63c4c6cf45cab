"""Very many managers in one thread: each a connection that speaks gRPC to a lighthouse, written by hand.

A real client would turn each of a thousand answers, a thousand members long, into objects: the driver would be
what is measured. This one sends what TorchFT's managers send and only counts what comes back; one answer of each
quorum is read.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STREAM_WINDOW = 2 << 20  # hyper's, which TorchFT's managers use
_READ = 1 << 18
_QUORUM, _HEARTBEAT = "Quorum", "Heartbeat"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(data: bytes) -> bytes:
    if len(data) >= 127:
        raise ValueError(f"too long for the one length byte of this HPACK: {len(data)}")
    return bytes([len(data)]) + data


def _header_block(method: str, authority: str, timeout: str) -> bytes:
    """Literals that touch no dynamic table, so that one block serves for every request."""
    return b"".join(
        (
            b"\x83\x86",  # POST, http
            b"\x04" + _text(f"/torchft.LighthouseService/{method}".encode()),
            b"\x01" + _text(authority.encode()),
            b"\x0f\x10" + _text(b"application/grpc"),
            b"\x00" + _text(b"te") + _text(b"trailers"),
            b"\x00" + _text(b"grpc-timeout") + _text(timeout.encode()),
        )
    )


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def members_of(answer: bytes) -> int:
    """How many participants a quorum's answer names."""

    def fields(data: bytes) -> list[tuple[int, bytes]]:
        found, at = [], 0
        while at < len(data):
            numbers = []
            wire = data[at] & 7
            for _ in range(2):  # the tag; then the value or its length
                number = shift = 0
                while True:
                    byte = data[at]
                    at += 1
                    number |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                numbers.append(number)
            if wire not in (0, 2):
                raise ValueError(f"unexpected wire type {wire}")
            length = numbers[1] if wire == 2 else 0
            found.append((numbers[0] >> 3, data[at : at + length]))
            at += length
        return found

    quorum = next(value for number, value in fields(answer) if number == 1)
    return sum(number == 2 for number, _ in fields(quorum))


class _Call:
    __slots__ = ("length", "method", "sent_s")

    def __init__(self, method: str) -> None:
        self.method, self.length, self.sent_s = method, 0, time.monotonic()


class Manager:
    """One connection. ``address`` may carry an identity before an ``@``."""

    def __init__(self, farm: Farm, number: int, address: str) -> None:
        host, port = address.rpartition("@")[2].rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 2, 0, 4, _STREAM_WINDOW)  # no push
        window = struct.pack(">I", 1 << 30)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(8, 0, 0, window))
        self.socket.setblocking(False)
        self.kept = bytearray()
        self._farm = farm
        self._keeps = number == 0
        self._replica_id = f"rep_{number}:{number:08x}-5d1f-4c1f-9b7e-0123456789ab".encode()
        self._blocks = {
            _QUORUM: _header_block(_QUORUM, address, "60S"),
            _HEARTBEAT: _header_block(_HEARTBEAT, address, "5S"),
        }
        self._where = f"http://127.0.0.1:{20_000 + number}".encode()
        self._store = f"127.0.0.1:{30_000 + number}".encode()
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._head = bytearray()
        self._rest = 0  # of the DATA frame that is being read
        self._flags = self._stream = 0

    def beat(self) -> None:
        """Send a heartbeat."""
        self._send(_HEARTBEAT, _field(1, self._replica_id))

    def ask(self, step: int) -> None:
        """Ask for a quorum."""
        self.kept.clear()
        requester = b"".join(
            (
                _field(1, self._replica_id),
                _field(2, self._where),
                _field(3, self._store),
                _field(4, step),
                _field(5, 1),
            )
        )
        self._send(_QUORUM, _field(1, requester))

    def _send(self, method: str, message: bytes) -> None:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        request = _frame(_HEADERS, _END_HEADERS, stream, self._blocks[method])
        request += _frame(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message)
        self._calls[stream] = _Call(method)
        self._write(request)

    def _write(self, data: bytes) -> None:
        if self.socket.send(data) != len(data):
            raise RuntimeError("the lighthouse does not read: a request was cut")

    def read(self, buffer: memoryview) -> None:
        """Take what has arrived."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise RuntimeError("the lighthouse closed a connection")
        at = 0
        while at < count:
            if self._rest:
                piece = buffer[at : min(count, at + self._rest)]
                call = self._calls[self._stream]
                call.length += len(piece)
                if self._keeps and call.method == _QUORUM:
                    self.kept += piece
                at += len(piece)
                self._rest -= len(piece)
                if not self._rest and self._flags & _END_STREAM:
                    self._end(self._stream)
                continue
            wanted = 9
            if len(self._head) >= 9:
                wanted += int.from_bytes(self._head[:3], "big")
            piece = buffer[at : min(count, at + wanted - len(self._head))]
            self._head += piece
            at += len(piece)
            if len(self._head) >= 9:
                self._frame()

    def _frame(self) -> None:
        """Handle the frame in ``_head`` if it is whole; of DATA only the header is ever put there."""
        length = int.from_bytes(self._head[:3], "big")
        kind, flags, stream = struct.unpack_from(">BBI", self._head, 3)
        if kind == _DATA:
            self._rest, self._flags, self._stream = length, flags, stream
            self._head.clear()
            if not length and flags & _END_STREAM:
                self._end(stream)
            return
        if len(self._head) < 9 + length:
            return
        payload = bytes(self._head[9:])
        self._head.clear()
        if kind in (_RST, _GOAWAY):
            raise RuntimeError(f"the lighthouse broke off: frame {kind}, {payload!r}")
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _HEADERS and flags & _END_STREAM:
            self._end(stream)

    def _end(self, stream: int) -> None:
        call = self._calls.pop(stream)
        if call.length < 5:
            raise RuntimeError(f"{call.method} was refused")
        self._farm.answered(call.method, call.length, time.monotonic() - call.sent_s)


class Farm:
    """All managers of one lighthouse, driven by the thread that calls.

    Attributes:
        beats_s: How long each heartbeat took.
        lengths: Of the answers to the asks in progress, in bytes.
    """

    def __init__(self, addresses: list[str], heartbeat_s: float) -> None:
        self.beats_s: list[float] = []
        self.lengths: list[int] = []
        self.managers: list[Manager] = []
        self._gap_s = heartbeat_s / len(addresses)
        self._turn = 0
        self._buffer = memoryview(bytearray(_READ))
        self._epoll = select.epoll()
        for number, address in enumerate(addresses):
            manager = Manager(self, number, address)
            self.managers.append(manager)
            self._epoll.register(manager.socket.fileno(), select.EPOLLIN)
        self._by_fd = {manager.socket.fileno(): manager for manager in self.managers}
        self._due_s = time.monotonic()

    def answered(self, method: str, length: int, took_s: float) -> None:
        """Note an answer (its managers call this)."""
        if method == _HEARTBEAT:
            self.beats_s.append(took_s)
        else:
            self.lengths.append(length - 5)

    def resume(self) -> None:
        """Forget the heartbeats that were left out while nobody drove."""
        self._due_s = time.monotonic()

    def drive(self, within_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Beat and read until ``until`` holds; whether it did ``within_s``."""
        deadline = time.monotonic() + within_s
        while not until():
            now = time.monotonic()
            if now >= deadline:
                return False
            while self._due_s <= now:
                self.managers[self._turn % len(self.managers)].beat()
                self._turn += 1
                self._due_s += self._gap_s
            for descriptor, _ in self._epoll.poll(min(self._due_s, deadline) - now):
                self._by_fd[descriptor].read(self._buffer)
        return True

    def close(self) -> None:
        """Close all connections."""
        self._epoll.close()
        for manager in self.managers:
            manager.socket.close()
