"""Hosts as network namespaces: real links that can be cut without anybody being told."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = itertools.count()
_NOWHERE = "02:00:00:00:00:99"
_DEVICE = "eth0"


def ip(*words: str) -> None:
    """Run ``ip``; what it complains of is raised."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Hosts ``0..n`` and a hub that joins them by a bridge, each a namespace of its own.

    A namespace shares the file system, and with it unix sockets: those are a line beside this network.

    Attributes:
        hub: Name of the hub's namespace.
        hub_address: Its address.
        hosts: Names of the hosts' namespaces.
        addresses: Their addresses.
    """

    def __init__(self, hosts: int) -> None:
        mark = f"smn{os.getpid() % 100_000}x{next(_NUMBERS)}"
        self.hub, self.hub_address = f"{mark}hub", "10.77.0.254"
        self.hosts = [f"{mark}h{number}" for number in range(hosts)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(hosts)]

    def make(self) -> None:
        """Make the namespaces and join them."""
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "set", "lo", "up")
        ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        ip("-n", self.hub, "addr", "add", f"{self.hub_address}/24", "dev", "br0")
        ip("-n", self.hub, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            # Both ends begin their lives in namespaces: nothing shows in the machine's own.
            port = self._port(number)
            ip("-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", _DEVICE, "netns", name)
            ip("-n", self.hub, "link", "set", port, "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", _DEVICE)
            ip("-n", name, "link", "set", _DEVICE, "up")

    def remove(self) -> None:
        """Remove the namespaces, and with them the links."""
        for name in (*self.hosts, self.hub):
            with contextlib.suppress(OSError):  # no such program: then there is nothing to remove
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)

    @staticmethod
    def inside(namespace: str, *argv: str) -> list[str]:
        """The command line that runs ``argv`` in a namespace, in place of itself."""
        return ["ip", "netns", "exec", namespace, *argv]

    def isolate(self) -> None:
        """Let each host reach the hub, and no other host: as where all may dial out and nobody be dialled."""
        for number in range(len(self.hosts)):
            ip("-n", self.hub, "link", "set", self._port(number), "type", "bridge_slave", "isolated", "on")

    def unplug(self, host: int) -> None:
        """Pull a host's cable at the hub: nothing gets through, and nobody is told."""
        ip("-n", self.hub, "link", "set", self._port(host), "down")

    def plug(self, host: int) -> None:
        """Undo :meth:`unplug`."""
        ip("-n", self.hub, "link", "set", self._port(host), "up")

    def lose(self, source: int, address: str) -> None:
        """Let all packets from a host to an address vanish; those the other way get through."""
        words = ("neigh", "replace", address, "lladdr", _NOWHERE, "dev", _DEVICE, "nud", "permanent")
        ip("-n", self.hosts[source], *words)

    def find(self, source: int, address: str) -> None:
        """Undo :meth:`lose`."""
        ip("-n", self.hosts[source], "neigh", "del", address, "dev", _DEVICE)

    @staticmethod
    def _port(host: int) -> str:
        return f"port{host}"


def why_not() -> str | None:
    """What keeps this machine from having such a network; None: nothing does."""
    net = Network(1)
    try:
        net.make()
    except (OSError, RuntimeError) as error:
        return f"no network namespaces here: {error}"
    finally:
        net.remove()
    return None


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """A network for the length of the block."""
    net = Network(hosts)
    try:
        net.make()
        yield net
    finally:
        net.remove()
