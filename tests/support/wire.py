"""The wire, written a second time from its description: what a stranger, or a broken peer, would send.

Frames as ``rust_core/src/wire.rs`` draws them, around the part of msgpack that our messages use.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

PROTOCOL_VERSION = 1
LAYOUT_VERSION = 1


def pack(value: Any) -> bytes:
    """Encode ``value`` as msgpack."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if value >= 0:
            return bytes([value]) if value < 128 else b"\xcf" + struct.pack(">Q", value)
        case int():
            return b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"\xdb" + struct.pack(">I", len(data)) + data
        case bytes():
            return b"\xc6" + struct.pack(">I", len(value)) + value
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
        case dict():
            pairs = b"".join(pack(key) + pack(item) for key, item in value.items())
            return b"\xdf" + struct.pack(">I", len(value)) + pairs
    raise TypeError(f"no msgpack for {value!r}")


class _Unpacker:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        assert len(piece) == count, "msgpack ends too early"
        self.at += count
        return piece

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def value(self) -> Any:
        tag = self.take(1)[0]
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag < 0x90:
            return self.map(tag & 15)
        if tag < 0xA0:
            return [self.value() for _ in range(tag & 15)]
        if tag < 0xC0:
            return self.take(tag & 31).decode()
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        numbers = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
        numbers |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
        if tag in numbers:
            return self.number(numbers[tag])
        lengths = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
        if tag in lengths:
            data = self.take(self.number(lengths[tag]))
            return data if tag < 0xD9 else data.decode()
        if tag in (0xDC, 0xDD):
            return [self.value() for _ in range(self.number(">H" if tag == 0xDC else ">I"))]
        if tag in (0xDE, 0xDF):
            return self.map(self.number(">H" if tag == 0xDE else ">I"))
        raise AssertionError(f"unknown msgpack tag {tag:#x}")

    def map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}


def unpack(data: bytes) -> Any:
    """Decode one msgpack value."""
    return _Unpacker(data).value()


def frame(message: Any, segments: list[bytes] | None = None) -> bytes:
    """Put ``message`` and raw ``segments`` into one frame."""
    header, parts = pack(message), segments or []
    body = struct.pack("<BHI", LAYOUT_VERSION, len(parts), len(header))
    body += b"".join(struct.pack("<I", len(part)) for part in parts) + header + b"".join(parts)
    return struct.pack("<I", len(body)) + body


class Peer:
    """One end of a unix socket that speaks, or breaks, the protocol."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(20)

    @classmethod
    def dial(cls, path: Path) -> Peer:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: Any) -> None:
        self.socket.sendall(frame(message))

    def recv(self) -> Any:
        """The next message; None at the end of the stream."""
        prefix = self._exactly(4)
        if not prefix:
            return None
        body = self._exactly(struct.unpack("<I", prefix)[0])
        version, segments, length = struct.unpack_from("<BHI", body)
        assert (version, segments) == (LAYOUT_VERSION, 0)
        assert len(body) == 7 + length
        return unpack(body[7:])

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                assert not data, "the stream ends inside a frame"
                return b""
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hello(
    peer: dict[str, Any], *, run_id: str = "run-1", token: str = "token", version: int = 1
) -> dict[str, Any]:
    """First message of whoever dials."""
    return {"version": version, "run_id": run_id, "token": token, "peer": peer}


def agent(host: str = "local", groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What an agent says of itself."""
    about = {"host": host, "attempt": 0, "pid": 7, "incarnation": 11, "groups": groups or [], "probe": None}
    return {"role": "agent", **about}
