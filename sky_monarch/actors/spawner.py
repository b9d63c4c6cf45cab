"""Starts the processes of this program's meshes, and hears of their ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.remote_log import RemoteLog
from sky_monarch.actors.runtime import listen_at
from sky_monarch.actors.zygote_limits import MOST_BYTES, hurry
from sky_monarch.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sky_monarch.actors.far_host import FarHost
    from sky_monarch.actors.runtime import Runtime

__all__ = ["Proc", "Spawner"]

_BOOT = "import sys; sys.path[:0] = [{home!r}]; from sky_monarch.actors.zygote import main; main({fd})"
_AT_ONCE = 32
_END_S = 5.0
_UNKNOWN = -1
#: Names a process to whatever zygote: one that has taken the place of another knows none of that one's.
_tokens = itertools.count(1)


@dataclass(slots=True, eq=False)
class Proc:
    """One process of a mesh, or one that takes its place.

    Attributes:
        name: ``procs[3]``.
        address: Of its socket; the same for all that take this place.
        on_end: Called once, when it has ended, with its wait status and last lines.
        token: Names it to the zygote.
        pid: None before it is forked.
        status: None while it lives.
        host: Name of its host, where that is another one.
        place: That host; None where it is this process's own.
        on_lost: Called once, with all that it was started with, where their host is lost.
        on_born: Called when it is forked.
        ended: Set when it has ended.
        wanted: False where its end is no failure.
        log: Takes what it prints.
    """

    name: str
    address: str
    on_end: Callable[[Proc], None]
    token: int = 0
    pid: int | None = None
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    wanted: bool = True
    log: RemoteLog = field(default_factory=RemoteLog)
    host: str = ""
    place: FarHost | None = None
    on_lost: Callable[[list[Proc], str], None] | None = None
    on_born: Callable[[Proc], None] | None = None


class Spawner:
    """This process's end of the line to its zygote."""

    def __init__(self, runtime: Runtime) -> None:
        import sky_monarch

        home = os.path.dirname(os.path.dirname(os.path.abspath(sky_monarch.__file__)))  # noqa: PTH100, PTH120
        self.procs: dict[int, Proc] = {}
        #: Its zygote has ended, and with it all that it has started.
        self.over = False
        self.lock = threading.Lock()
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-c", _BOOT.format(home=home, fd=theirs.fileno())]
            # In a session of its own: Ctrl-C is for the program, which then ends what it has spawned.
            self.zygote = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
        settings = {
            "path": path,
            "token": runtime.token,
            "folder": runtime.folder,
            "made": runtime.made_folder,
        }
        self.line.sendall(json.dumps(settings).encode())
        self.listener = threading.Thread(target=self._listen, name="sky-monarch-supervision", daemon=True)
        self.listener.start()

    def start(self, procs: list[Proc], spares: Sequence[Proc] = ()) -> None:
        """Have processes forked. They can be dialled from here on, and answer when they are there.

        Args:
            procs: Those that are wanted.
            spares: Processes that stand by: the first of ``procs`` are made of these, where they still live.

        Raises:
            LaunchError: The zygote is gone.
        """
        for at in range(0, len(procs), _AT_ONCE):
            some = procs[at : at + _AT_ONCE]
            listeners = [listen_at(proc.address) for proc in some]
            try:
                wanted = []
                with self.lock:
                    for proc, spare in itertools.zip_longest(some, spares[at : at + len(some)]):
                        self._register(proc)
                        wanted.append({"id": proc.token, "name": proc.name, "address": proc.address})
                        if spare is not None and self.procs.pop(spare.token, None) is not None:
                            wanted[-1]["spare"] = spare.token
                self._say({"start": wanted}, [one.fileno() for one in listeners])
            finally:
                for one in listeners:
                    one.close()

    def start_spares(self, procs: list[Proc], described: list[str]) -> None:
        """Have processes forked that stand by, and import what is described.

        Raises:
            LaunchError: The zygote is gone.
        """
        with self.lock:
            for proc in procs:
                self._register(proc)
        self._say({"spare": [proc.token for proc in procs]})
        self.warm(procs, described)

    def warm(self, procs: list[Proc], described: list[str]) -> None:
        """Have processes that stand by import what is described.

        Raises:
            LaunchError: The zygote is gone.
        """
        for each in described if procs else ():
            self._say({"warm": each, "spares": [proc.token for proc in procs]})

    def kill(self, procs: list[Proc]) -> None:
        """Kill processes; their ends are heard of as always.

        Raises:
            LaunchError: The zygote is gone.
        """
        live = [proc.token for proc in procs if not proc.ended.is_set()]
        if live:
            self._say({"kill": live})

    def _register(self, proc: Proc) -> None:
        proc.token = next(_tokens)
        self.procs[proc.token] = proc

    def _say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.line, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise LaunchError(f"the process that starts others is gone: {error}") from error

    def _listen(self) -> None:
        hurry()
        while True:
            try:
                data = self.line.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            try:
                self._hear(json.loads(data))
            except Exception:  # noqa: BLE001  (one failure of a handler must not hide the next death)
                traceback.print_exc()
        self.over = True
        self.line.close()
        # It kills what it has started when it ends, however it ends.
        for proc in list(self.procs.values()):
            self._ended(proc, _UNKNOWN, ["the process that it was forked from has ended"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.zygote.wait(_END_S)

    def _hear(self, message: dict[str, Any]) -> None:
        if "born" in message:
            for token, pid in message["born"].items():
                born = self.procs.get(int(token))
                if born is not None:
                    born.pid = pid
                    if born.on_born is not None:
                        born.on_born(born)
        elif "said" in message:
            proc = self.procs.get(message["said"])
            if proc is not None:
                proc.log.hear(proc.name, message["text"])
        elif "dead" in message:
            # One that stood by and died when its place was found is not missed: another one was forked for that.
            proc = self.procs.get(message["dead"])
            if proc is not None:
                proc.pid = message["pid"]
                self._ended(proc, message["status"], message["lines"])

    def _ended(self, proc: Proc, status: int, lines: list[str]) -> None:
        with self.lock:
            self.procs.pop(proc.token, None)
        proc.status = status
        proc.lines = lines
        try:
            proc.on_end(proc)
        finally:
            proc.ended.set()

    def close(self) -> None:
        """End the zygote and with it all that it has started."""
        logs = {proc.log for proc in self.procs.values()}
        for proc in list(self.procs.values()):
            proc.wanted = False
        with contextlib.suppress(OSError):  # it is over already
            self.line.shutdown(socket.SHUT_WR)
        try:
            self.zygote.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.zygote.kill()
            self.zygote.wait()
        if threading.current_thread() is not self.listener:
            self.listener.join(1.0)
        for log in logs:
            log.flush()
        self.line.close()
