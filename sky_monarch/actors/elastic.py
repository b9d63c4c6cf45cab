"""The processes of a mesh as ranks: what torch's elastic launcher would tell them, and where they meet.

Rank 0 listens first, and only then is its port announced, so nobody can take it in between. The store that answers
there is torch's; it is made when the first rank connects, so a mesh that needs no torch imports none.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.actor import Actor, endpoint
from sky_monarch.actors.context import current_rank
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sky_monarch.actors.extent import Extent

__all__ = ["Membership", "Rank", "Runner", "member"]

LOOPBACK = "127.0.0.1"
_POLL_S, _LONGEST_POLL_S = 0.01, 0.25
#: Stores of earlier generations that are kept: ranks that leave them are not disturbed.
_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which processes are ranks together.

    Attributes:
        key: Of one set-up, never used again.
        generation: Counts the set-ups of a mesh, from 0.
        extent: Dimensions of the mesh.
        addresses: Of its processes, by rank.
        hosts: Names of their hosts, by rank.
        master: Address and port of the store.
        more: Further variables of the environment; None takes one away.
    """

    key: str
    generation: int
    extent: Extent
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]
    master: tuple[str, int]
    more: Mapping[str, str | None]

    def environment(self, rank: int) -> dict[str, str | None]:
        """What ``rank`` finds in its environment."""
        hosts = list(dict.fromkeys(self.hosts))
        here = [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]
        size = len(self.hosts)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "GROUP_RANK": str(hosts.index(self.hosts[rank])),
            "GROUP_WORLD_SIZE": str(len(hosts)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(size),
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "TORCHELASTIC_RUN_ID": self.key,
            "TORCHELASTIC_RESTART_COUNT": str(self.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(self.generation),
            # The store is there already, on rank 0 too: all ranks are its clients.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": None,
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Member:
    """This process's place among the ranks."""

    membership: Membership
    rank: int


def _has(*modules: str) -> bool:
    """Whether these are imported, to their ends."""
    found = [sys.modules.get(name) for name in modules]
    return all(one is not None and not getattr(one.__spec__, "_initializing", False) for one in found)


class _Store:
    """A listening socket, and torch's store on it once somebody comes."""

    def __init__(self, address: str, port: int) -> None:
        self._listener = socket.create_server((address, port), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._address = address
        self._ours, self._stop = socket.socketpair()
        threading.Thread(target=self._serve, name="sky-monarch-store", daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._stop:
            ready, _, _ = select.select([self._listener, self._stop], [], [])
            # Rank 0 has to come itself, or nobody can meet; so it imports torch, which two threads must not do at once.
            pause_s = _POLL_S
            while self._stop not in ready and not _has("torch", "torch.distributed"):
                ready, _, _ = select.select([self._stop], [], [], pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
            if self._stop in ready:
                return
            from torch.distributed import TCPStore

            store = TCPStore(
                self._address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
            )
            self._stop.recv(1)
            del store

    def close(self) -> None:
        """Let nobody in any more."""
        self._ours.close()


_member: Member | None = None
_stores: deque[_Store] = deque()


def member() -> Member:
    """This process's place among the ranks.

    Raises:
        ConfigError: It has none yet.
    """
    if _member is None:
        raise ConfigError(
            "this process is no rank of a mesh yet",
            hint="call setup_torch_elastic_env(mesh) where the mesh was spawned, or run this by mesh.spmd(fn)",
        )
    return _member


class Rank(Actor):
    """Makes its process a rank. Never busy for long."""

    @endpoint
    def place(self) -> tuple[str, tuple[str, int, int] | None]:
        """Name of this host, and of the set-up that this process belongs to the key, its rank, and their number."""
        if _member is None:
            return socket.gethostname(), None
        return socket.gethostname(), (_member.membership.key, _member.rank, len(_member.membership.hosts))

    @endpoint
    def listen(self, address: str | None, port: int) -> tuple[str, int]:
        """Of rank 0: open the place where all meet; returns it.

        Args:
            address: None for that of this host in its run, or loopback outside of one.
            port: 0 for a free one.
        """
        found = address or os.environ.get("SKY_MONARCH_ADDRESS") or LOOPBACK
        try:
            store = _Store(found, port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {found}:{port}: {error}") from error
        _stores.append(store)
        while len(_stores) > _KEPT:
            _stores.popleft().close()
        return found, store.port

    @endpoint
    def join(self, membership: Membership) -> None:
        """Be a rank of it from now on."""
        global _member
        rank = current_rank().rank
        for name, value in membership.environment(rank).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _member = Member(membership, rank)


class Runner(Actor):
    """Runs functions as ranks do."""

    @endpoint
    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn``."""
        return fn(*args, **kwargs)
