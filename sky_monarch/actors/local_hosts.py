"""Several hosts on this machine: what a program for many hosts is tried out with."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from sky_monarch.actors.attach import HostListener
from sky_monarch.actors.keys import ActorKeys
from sky_monarch.actors.runtime import runtime
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from sky_monarch.actors.host_mesh import HostMesh

__all__ = ["local_hosts"]

_MOST_HOSTS = 64
_END_S = 5.0


def local_hosts(count: int, *, dim: str = "hosts", timeout: float = 60.0) -> HostMesh:
    """Start so many hosts on this machine and attach to them, over TLS on loopback as over a network.

    Args:
        count: How many.
        dim: Name of the dimension.
        timeout: Seconds, until all of them are there.

    Raises:
        ConfigError: There would be none, or too many, or this program is attached to other hosts already.
        LaunchError: They did not come.
    """
    if not 1 <= count <= _MOST_HOSTS:
        raise ConfigError(f"{count} local hosts", hint=f"from 1 to {_MOST_HOSTS}")
    client, hosts = ActorKeys.create(count)
    door = HostListener("127.0.0.1:0", keys=client)
    argv = [sys.executable, "-m", "sky_monarch.actor_host", "--dial", door.address, "--keys", "-"]
    argv += ["--within", f"{timeout:g}"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, keys in enumerate(hosts):
            name = f"local-{number}"
            # In a session of its own: Ctrl-C is for the program, with which its hosts end.
            one = subprocess.Popen(
                [*argv, "--name", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            started.append(one)
            assert one.stdin is not None  # noqa: S101  (asked for above)
            with one.stdin as line:
                line.write(keys.to_text().encode())
        mesh = door.hosts(count, dim=dim, timeout=timeout)
    except BaseException:
        for one in started:
            one.kill()
            one.wait()
        raise
    runtime().at_close.append(lambda: _wait(started))
    return mesh


def _wait(hosts: list[subprocess.Popen[bytes]]) -> None:
    """The program has let them go: they end by themselves."""
    for one in hosts:
        try:
            one.wait(_END_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
