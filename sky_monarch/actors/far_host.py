"""Another host, as a process sees it that starts processes there."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from sky_monarch.actors import serial
from sky_monarch.actors.future import VALUE
from sky_monarch.errors import LaunchError

if TYPE_CHECKING:
    from sky_monarch._core import ActorReplies
    from sky_monarch.actors.runtime import Runtime
    from sky_monarch.actors.spawner import Proc

__all__ = ["SERVER", "FarHost", "Standby"]

#: What stands by on a host for one mesh of one owner: its name there, how many, and what they are to import.
Standby = tuple[str, int, "list[str]"]

#: Name of the socket of the process that serves a host.
SERVER = "host"
_START_S = 60.0
_UNKNOWN = -1


class FarHost:
    """A host that is not this process's own. It starts and ends processes there, and hears of their ends.

    Args:
        runtime: Of this process.
        folder: Of the sockets there, which names it.
        name: What people call it.
    """

    def __init__(self, runtime: Runtime, folder: str, name: str) -> None:
        from sky_monarch._core import ActorTargets

        self.runtime = runtime
        self.folder = folder
        self.name = name
        self.lock = threading.Lock()
        self.procs: dict[int, Proc] = {}
        self.tokens = itertools.count(1)
        self.gone: str | None = None
        self.watched = False
        self._server = ActorTargets([(f"{folder}/{SERVER}", "")])

    def ask(self, method: str, *args: Any) -> ActorReplies:
        """Ask the host's own process for something."""
        body = serial.dumps((self.runtime.address, *args))
        return self.runtime.node.call(self._server, 0, method, *body)

    def begin(self, procs: list[Proc], standby: Standby | None = None) -> ActorReplies:
        """Have processes started; :meth:`settle` waits until they can be dialled.

        Args:
            procs: Which.
            standby: What stands by there for their mesh: some of them are made of it.

        Raises:
            LaunchError: The host is lost.
        """
        with self.lock:
            self.check()
            for proc in procs:
                proc.token = next(self.tokens)
                proc.host = self.name
                self.procs[proc.token] = proc
            watched, self.watched = self.watched or self.runtime.attached.hears, True
        if not watched:
            # Only the program itself is told by its gateway.
            threading.Thread(target=self._watch, name="sky-monarch-host", daemon=True).start()
        return self.ask("start", [(proc.token, proc.name, proc.address) for proc in procs], standby)

    def _watch(self) -> None:
        replies = self.ask("attend")
        replies.wait()
        for _, kind, body, _ in replies.take():
            self.lost(body if kind < 0 else f"{self.name} has ended")

    def check(self) -> None:
        """Raise :class:`LaunchError` where the host is lost."""
        if self.gone is not None:
            raise LaunchError(f"no process can be started on {self.name}: {self.gone}")

    def settle(self, replies: ActorReplies) -> None:
        """Wait for what :meth:`begin` began.

        Raises:
            LaunchError: The host is lost, or could not start them.
        """
        if not replies.wait(_START_S):
            raise LaunchError(f"{self.name} has started no process within {_START_S:g} s")
        (_, kind, body, buffers) = replies.take()[0]
        if kind != VALUE:
            why = body if kind < 0 else serial.loads(body, buffers).words
            raise LaunchError(f"{self.name} could not start processes: {why}")

    def kill(self, procs: list[Proc]) -> None:
        """Kill processes; their ends are heard of as always."""
        live = [proc.token for proc in procs if not proc.ended.is_set()]
        if live and self.gone is None:
            self.ask("kill", live)

    def hear(self, kind: str, token: int, *what: Any) -> None:
        """Something has happened to a process there."""
        proc = self.procs.get(token)
        if proc is None:
            return
        if kind == "born":
            (proc.pid,) = what
        elif kind == "said":
            proc.log.hear(proc.name, *what)
        elif kind == "dead":
            proc.pid, proc.status, proc.lines = what
            self.procs.pop(token, None)
            try:
                proc.on_end(proc)
            finally:
                proc.ended.set()

    def let_go(self) -> None:
        """All that this process has started there is about to end, which is no failure."""
        with self.lock:
            for proc in self.procs.values():
                proc.wanted = False

    def lost(self, reason: str) -> None:
        """The host is lost: the end of all its processes, told once to each who has started some together."""
        with self.lock:
            if self.gone is not None:
                return
            self.gone = reason
            procs, self.procs = list(self.procs.values()), {}
        together: dict[Any, list[Proc]] = {}
        for proc in procs:
            proc.status = _UNKNOWN
            together.setdefault(proc.on_lost, []).append(proc)
        for on_lost, some in together.items():
            try:
                if on_lost is not None:
                    on_lost(some, reason)
            finally:
                for proc in some:
                    proc.ended.set()
