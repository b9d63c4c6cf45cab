"""A network in between that fails as networks do: it resets connections, or takes all and passes nothing on."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

_CHUNK = 64 * 1024


class Proxy:
    """Passes connections on to one address.

    Args:
        to: ``host:port``.

    Attributes:
        address: ``host:port`` where it listens.
        made: Connections that were made so far.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.made = 0
        self._lock = threading.Lock()
        self._live: list[_Pair] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._to, timeout=5)
            except OSError:
                _reset(near)
                continue
            pair = _Pair(near, far)
            with self._lock:
                self._live.append(pair)
                self.made += 1
            threading.Thread(target=pair.run, daemon=True).start()

    def reset_after(self, size: int) -> None:
        """Reset what is connected as soon as so many bytes have passed."""
        with self._lock:
            passed = any(pair.passed >= size for pair in self._live)
        if passed:
            self.reset()

    def reset(self) -> None:
        """Reset what is connected, both ways: what is under way is lost."""
        with self._lock:
            live, self._live = self._live, []
        for pair in live:
            pair.reset()

    def swallow(self) -> None:
        """Pass nothing on any more of what is connected now, and say nothing."""
        with self._lock:
            live, self._live = self._live, []
        for pair in live:
            pair.swallows = True

    def close(self) -> None:
        """Nobody listens any more; what is connected is reset."""
        # A thread that accepts keeps the socket open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()


class _Pair:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.both = (near, far)
        self.swallows = False
        self.passed = 0
        self._over = threading.Event()

    def run(self) -> None:
        other = {self.both[0]: self.both[1], self.both[1]: self.both[0]}
        try:
            while not self._over.is_set():
                for one in select.select(self.both, [], [], 0.02)[0]:
                    data = one.recv(_CHUNK)
                    if not data:
                        return
                    if not self.swallows:
                        other[one].sendall(data)
                        self.passed += len(data)
        except OSError:
            pass
        finally:
            for one in self.both:
                (_reset if self._over.is_set() else socket.socket.close)(one)

    def reset(self) -> None:
        self._over.set()


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
