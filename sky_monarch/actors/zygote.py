"""What the processes of a mesh are forked from: a process with one thread that has imported little.

It is started by whoever spawns, and speaks with it over one socket, on which a message is one JSON object:

    ▶ {"start": [{"id", "name", "address", "spare"?}, …]}     with one listening socket for each
    ▶ {"spare": [id, …]}    {"warm": text, "spares": [id, …]}    {"kill": [id, …]}
    ◀ {"born": {id: pid}}    {"said": id, "text"}    {"dead": id, "pid", "status", "lines"}

A spare is a process without a place, which imports what it is told and then waits for one (`standby`).

It sees each death by a pidfd, after everything that the process has printed. When the socket closes, it kills all that
it has started, and theirs, and removes the folder of their sockets where that process has made it: so nothing outlives
a program that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sky_monarch import _core
from sky_monarch.actors.zygote_limits import LATER, MOST_BYTES, MOST_FDS, give_way, hurry, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_LINES = 20
_LONGEST_LINE = 2000
_READ = 32 * 1024
_SAID = 12 * 1024  # as JSON at most six times as long
_END_S = 4.0
#: Between two spares: their imports do not come all at once.
_APART_S = 0.02
#: Between a death and the next spare.
_QUIET_S = 0.1
#: So long a spare gives way to all others: then it takes turns, as on a busy machine it would never come to be one.
_PATIENCE_S = 2.0


class _Child:
    """A process, as the zygote knows it."""

    def __init__(self, child: int, pid: int, pidfd: int, output: int) -> None:
        self.id = child
        self.pid = pid
        self.pidfd = pidfd
        self.output = output
        self.lines: list[str] = []
        self.rest = b""
        self.ended = False
        #: Where it is told what to import, and of its place, while it has none.
        self.line: socket.socket | None = None

    def tell(self, data: bytes, *fds: int) -> bool:
        """Tell it something while it stands by; False where it hears nothing any more."""
        if self.line is None:
            return False
        try:
            self.line.setblocking(False)
            socket.send_fds(self.line, [data], fds)
        except OSError:
            return False
        return True

    def hear(self) -> bytes:
        """What it has printed by now, in whole lines."""
        heard = b""
        while len(heard) < _READ:
            try:
                data = os.read(self.output, _READ)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            heard += data
        whole, newline, self.rest = (self.rest + heard).rpartition(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            whole, newline, self.rest = whole + newline + self.rest, b"\n", b""
        return whole + newline

    def keep(self, text: str) -> None:
        """Remember its last lines."""
        self.lines.extend(line[:_LONGEST_LINE] for line in text.splitlines())
        del self.lines[:-_LINES]


class _Zygote:
    def __init__(self, line: socket.socket, token: str, folder: str, made: bool) -> None:
        self.line = line
        self.token = token
        self.folder = folder
        self.made = made
        self.children: dict[int, _Child] = {}
        self.by_fd: dict[int, _Child] = {}
        #: Spares that are to be forked, and what each is to be told then.
        self.awaited: dict[int, list[bytes]] = {}
        self.next_spare_s = 0.0
        #: Spares that compute only while nobody else does, and until when.
        self.giving_way: deque[tuple[float, int]] = deque()
        self.poll = select.poll()
        self.poll.register(line.fileno(), select.POLLIN)
        self.nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.may_hurry = hurry()

    def say(self, **message: Any) -> None:
        self.line.sendall(json.dumps(message).encode())

    def run(self) -> None:
        """Serve until the socket closes. Returns in a forked process too, after its life."""
        while True:
            for fd, _ in self.poll.poll(self.wait_ms()):
                if fd == self.line.fileno():
                    if not self.obey():
                        return
                    continue
                child = self.by_fd.get(fd)
                if child is None:
                    continue
                if fd == child.pidfd:
                    self.bury(child)
                else:
                    self.pass_on(child, fd)
            self.reap_strays()
            if self.awaited and time.monotonic() >= self.next_spare_s:
                # One at a time: a fork takes milliseconds, and nobody hears of a death meanwhile.
                self.fork_spare(next(iter(self.awaited)))
                self.next_spare_s = time.monotonic() + _APART_S
            while self.giving_way and time.monotonic() >= self.giving_way[0][0]:
                _, spare = self.giving_way.popleft()
                if spare in self.children:
                    take_turns(self.children[spare].pid, self.nice + LATER)

    def wait_ms(self) -> float | None:
        """Until something is to be done that nobody asks for; None where there is nothing."""
        due_s = [self.next_spare_s] if self.awaited else []
        due_s += [self.giving_way[0][0]] if self.giving_way else []
        return max(0.0, min(due_s) - time.monotonic()) * 1e3 if due_s else None

    def obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.line, MOST_BYTES, MOST_FDS)
        if not data:
            return False
        message = json.loads(data)
        for number, (wanted, fd) in enumerate(zip(message.get("start", ()), fds, strict=True)):
            if not self.place(wanted, fd):
                self.fork(wanted["id"], fds[number + 1 :], partial(self.live, wanted, fd))
            os.close(fd)
        for spare in message.get("spare", ()):
            self.awaited[spare] = []
        for spare in message.get("spares", ()):
            if spare in self.awaited:
                self.awaited[spare].append(data)
            elif spare in self.children:
                # Where it is too busy to hear of more, it imports that when it needs it.
                self.children[spare].tell(data)
        for child in message.get("kill", ()):
            if child in self.awaited:
                # So that its end is told as every other.
                self.fork_spare(child)
            if child in self.children:
                # Not yet waited for, so the number is still its own.
                os.kill(self.children[child].pid, signal.SIGKILL)
        return True

    def place(self, wanted: dict[str, Any], listener: int) -> bool:
        """Give a place to the process that stands by for it. False where there is none, or it hears nothing."""
        # One that is not there yet comes too late.
        self.awaited.pop(wanted.get("spare", 0), None)
        spare = self.children.get(wanted.get("spare", 0))
        if spare is None:
            return False
        if not spare.tell(
            json.dumps({"name": wanted["name"], "address": wanted["address"]}).encode(), listener
        ):
            os.kill(spare.pid, signal.SIGKILL)
            return False
        assert spare.line is not None  # noqa: S101  (it was told)
        if self.may_hurry:
            take_turns(spare.pid, self.nice)  # from here on somebody waits for it
        spare.line.close()
        spare.line = None
        del self.children[spare.id]
        spare.id = wanted["id"]
        self.children[spare.id] = spare
        self.say(born={spare.id: spare.pid})
        return True

    def fork_spare(self, child: int) -> None:
        """Fork ``child``, which is awaited, and tell it what it is to import."""
        told = self.awaited.pop(child)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.fork(child, [mine.fileno()], partial(self.stand_by, its))
        made = self.children[child]
        if self.may_hurry:
            give_way(made.pid)
            self.giving_way.append((time.monotonic() + _PATIENCE_S, child))
        made.line = mine
        for data in told:
            made.tell(data)

    def fork(self, child: int, fds: list[int], be: Callable[[], int]) -> None:
        """Fork ``child``, which runs ``be`` and keeps none of ``fds``."""
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become(be, [reading, *fds], writing, parent)
        os.close(writing)
        os.set_blocking(reading, False)
        made = _Child(child, pid, os.pidfd_open(pid), reading)
        self.children[made.id] = made
        for fd in (made.pidfd, reading):
            self.by_fd[fd] = made
            self.poll.register(fd, select.POLLIN)
        self.say(born={made.id: pid})

    def live(self, wanted: dict[str, Any], listener: int) -> int:
        from sky_monarch.actors import process

        return process.live(wanted["name"], wanted["address"], self.folder, self.token, listener)

    def stand_by(self, line: socket.socket) -> int:
        from sky_monarch.actors import standby

        found = standby.stand_by(line)
        line.close()
        if found is None:
            return 0
        name, address, listener = found
        return self.live({"name": name, "address": address}, listener)

    def become(self, be: Callable[[], int], others: list[int], output: int, parent: int) -> NoReturn:
        """Be a process that was wanted; never returns."""
        code = 1
        try:
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
            _core.die_with_parent(parent)
            self.line.close()
            for child in self.children.values():
                if child.line is not None:
                    child.line.close()
            for fd in (*self.by_fd, *others):
                with contextlib.suppress(OSError):  # of these some were closed with a process that has ended
                    os.close(fd)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            code = be()
        except BaseException:  # noqa: BLE001  (it would go on as a second zygote)
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def pass_on(self, child: _Child, fd: int) -> None:
        self.tell(child, child.hear())
        if child.ended:
            self.forget(fd)

    def tell(self, child: _Child, heard: bytes) -> None:
        text = heard.decode(errors="replace")
        child.keep(text)
        for at in range(0, len(text), _SAID):
            self.say(said=child.id, text=text[at : at + _SAID])

    def forget(self, fd: int) -> None:
        self.by_fd.pop(fd, None)
        with contextlib.suppress(KeyError):
            self.poll.unregister(fd)
        os.close(fd)

    def bury(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        if child.output in self.by_fd:
            self.tell(child, child.hear() + child.rest)
            self.forget(child.output)
        self.forget(child.pidfd)
        if child.line is not None:
            child.line.close()
        del self.children[child.id]
        # Deaths come together: what is to stand by does not take their time.
        self.next_spare_s = time.monotonic() + _QUIET_S
        self.say(dead=child.id, pid=child.pid, status=status, lines=child.lines)

    def reap_strays(self) -> None:
        """Wait for what its own parents left behind."""
        known = {child.pid for child in self.children.values()}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in known:
                return
            os.waitpid(found.si_pid, 0)

    def end(self) -> None:
        """Kill everything below this process, and leave nothing."""
        _core.end_descendants(_END_S)
        # The end of an actor that has started processes is not that of its program.
        if self.made and os.path.basename(self.folder).startswith("sky-monarch-"):  # noqa: PTH119
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)


def main(fd: int) -> None:
    """Serve the socket ``fd`` until it closes."""
    line = socket.socket(fileno=fd)
    data, _, _, _ = socket.recv_fds(line, MOST_BYTES, 1)
    settings = json.loads(data)
    sys.path[:] = settings["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _core.adopt_orphans()
    import asyncio  # noqa: F401  (most actors need it; imported once here, not in each of them)
    import gc
    import traceback  # noqa: F401

    from sky_monarch.actors import process  # noqa: F401

    gc.collect()
    gc.freeze()  # what is here already is never copied by a collection in a child
    zygote = _Zygote(line, settings["token"], settings["folder"], settings["made"])
    try:
        zygote.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # whoever started this is gone
    finally:
        zygote.end()
