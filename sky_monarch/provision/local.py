"""Hosts that are processes of this machine: what SkyPilot's task would run, with the same variables.

Each attempt has a folder, ``<run>/hosts/<host>-a<attempt>``, and a session of its own: it outlives the provisioner,
and the next one finds it by what is written there. Its secrets are in its environment, never in its arguments.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.launch.door import Door
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import write_json
from sky_monarch.launch.placement import cluster_name
from sky_monarch.launch.process import Process
from sky_monarch.provision.host_task import address, variables
from sky_monarch.provision.provider import (
    HostOrder,
    Kind,
    Launched,
    Notice,
    ProvisionError,
    Seen,
    Turn,
    cluster_of,
    is_head,
    task_of,
)
from sky_monarch.provision.tree import Tree

__all__ = ["LocalProvider"]

_log = structlog.get_logger()
_GRACE_S = 10.0
_STATE = "process.json"
_LOG = "host.log"
_TAIL_BYTES = 16_384
_CHATTER = re.compile(r"\S+Z +(INFO|DEBUG|TRACE) ")  # of a host that was well
_SIGNALLED = 128
#: What the machine has too little of, for now.
_SHORT = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC}


@dataclass(frozen=True, slots=True)
class _Life:
    """One attempt of a host on this machine."""

    host: str
    attempt: int
    folder: Path
    tree: Tree

    @property
    def cluster(self) -> str:
        """Its name among those of other providers."""
        return cluster_name(self.host, self.attempt)

    @property
    def lives(self) -> bool:
        """Whether its agent, or what will become that, does."""
        return self.tree.leader is not None and self.tree.leader.alive


class LocalProvider:
    """Starts hosts' agents here.

    Args:
        run_id: The run.
        run_dir: Its folder.
        workdir: Where the job's own commands run, unless the task says so.
        environ: What hosts inherit beneath the task's own variables; by default what agents may see of ours, without
            the mark of the service that this process is: the head's agent ends whatever carries that with it.
        grace_s: Seconds between TERM and KILL.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        *,
        workdir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._run_id = run_id
        self._hosts = run_dir / "hosts"
        self._workdir = workdir
        self._environ = agent_environment(run_id) if environ is None else dict(environ)
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._watched: dict[int, _Life] = {}  # by pidfd
        self._poll = select.poll()
        self._ended: list[Notice] = []
        for life in self._lives("*"):
            if life.lives:
                self._watch(life)
            elif life.tree.leader is not None:
                reason = "its agent ended while no provisioner looked"
                self._ended.append(Notice(host=life.host, attempt=life.attempt, reason=reason))

    def launch(
        self, order: HostOrder, choice: Mapping[str, Any], turn: Turn, *, stop: threading.Event
    ) -> Launched:
        """Start a host's agent, or find the one that runs. It takes milliseconds: nobody could stop it."""
        del turn, stop
        known = self._life(order.host, order.attempt)
        if known is not None and known.lives:
            return Launched(place="this machine")
        life = known or self._new(order.host, order.attempt)
        # Whoever started it may have been killed before it could write that down.
        if left := Tree(None, life.tree.mark).end(grace_s=0.0):
            raise ProvisionError(f"processes of this very attempt could not be ended: {_pids(left)}")
        known_here = cluster_of(choice, order.host) is not None or is_head(choice, order.host)
        if choice.get("hosts") and not known_here:
            raise ProvisionError("the choice has no such host", kind=Kind.REFUSED)
        try:
            self._start(order, task_of(choice, order.host), life)
        except OSError as error:
            kind = Kind.CAPACITY if error.errno in _SHORT else Kind.REFUSED
            raise ProvisionError(f"the agent could not be started: {error}", kind=kind) from error
        return Launched(place="this machine", usd_per_hour=0.0)

    def _start(self, order: HostOrder, task: Mapping[str, Any] | None, life: _Life) -> None:
        life.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        addressed = address(task or {}, order)
        if run := addressed.get("run"):
            argv = ["bash", "-c", str(run)]
        else:
            # -P: a folder named sky_monarch in the working folder is not the package.
            argv = [sys.executable, "-P", "-m", "sky_monarch.agent", "--enrol", str(life.folder)]
        env = {
            **self._environ,
            **variables(order, life.tree.mark),
            **addressed["envs"],
            **addressed["secrets"],
        }
        log = os.open(life.folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            started = subprocess.Popen(
                argv,
                cwd=addressed.get("workdir") or self._workdir or life.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        leader = Process.of(started.pid)
        write_json(
            life.folder / _STATE,
            {"pid": started.pid, "start_ticks": leader.start_ticks if leader else -1},
        )
        self._watch(_Life(life.host, life.attempt, life.folder, Tree(leader, life.tree.mark)), started)

    def found(self, host: str) -> dict[str, int]:
        """Names are those of this run's folder: nobody else has any."""
        return {life.cluster: life.attempt for life in self._lives(host) if life.tree.leader is not None}

    def status(self, clusters: Sequence[str]) -> dict[str, Seen]:
        """Looks at the processes."""
        living = {life.cluster for life in self._lives("*") if life.lives}
        return {cluster: Seen.UP if cluster in living else Seen.GONE for cluster in clusters}

    def certain(self, clusters: Sequence[str]) -> dict[str, str]:
        """The kernel knows."""
        seen = self.status(clusters)
        return {cluster: "its processes have ended" for cluster in clusters if seen[cluster] is Seen.GONE}

    def down(self, cluster: str, *, stop: threading.Event) -> None:
        """End the whole tree of an attempt, and remove its secrets."""
        del stop  # it has a limit of seconds
        left = []
        for life in (life for life in self._lives("*") if life.cluster == cluster):
            left += life.tree.end(grace_s=self._grace_s)
            _tidy(life.folder)
        if left:
            raise ProvisionError(f"these processes of {cluster} could not be ended: {_pids(left)}")

    def logs(self, cluster: str, *, lines: int) -> str:
        """The end of what it printed."""
        try:
            (life,) = (life for life in self._lives("*") if life.cluster == cluster)
            with (life.folder / _LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except (OSError, ValueError):
            return ""

    def door(self, head: str, attempt: int) -> Door | None:
        """Its own socket: it is a process of this machine."""
        try:
            text = (self._hosts / f"{head}-a{attempt}" / "run.json").read_text(encoding="utf-8")
            return Door(socket=str(json.loads(text)["sockets"]["api"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def notices(self) -> list[Notice]:
        """Which hosts have ended since the last call: the kernel says so at once, and it is certain."""
        for descriptor, _ in self._poll.poll(0):
            with self._lock:
                life = self._watched.pop(descriptor)
            self._poll.unregister(descriptor)
            code = _reap(descriptor)
            os.close(descriptor)
            said = " ".join(
                line for line in self.logs(life.cluster, lines=3).splitlines() if not _CHATTER.match(line)
            )
            reason = f"its agent {_end_of(code)}" + (f": {said}" if said else "")
            self._ended.append(Notice(host=life.host, attempt=life.attempt, reason=reason))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Hosts live on."""
        with self._lock:
            for descriptor in self._watched:
                self._poll.unregister(descriptor)
                os.close(descriptor)
            self._watched.clear()

    def _watch(self, life: _Life, started: subprocess.Popen[bytes] | None = None) -> None:
        pid = started.pid if started else life.tree.leader.pid if life.tree.leader else 0
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # a stranger that has just ended; of a child there is always one
            return
        if started is not None:
            started.returncode = 0  # it is reaped by its pidfd, never by the garbage collector of Popen
        with self._lock:
            self._watched[descriptor] = life
            self._poll.register(descriptor, select.POLLIN)

    def _new(self, host: str, attempt: int) -> _Life:
        return _Life(
            host,
            attempt,
            self._hosts / f"{host}-a{attempt}",
            Tree(None, f"SKYPILOT_TASK_ID=sky-local-{self._run_id}_{host}_{attempt}"),
        )

    def _life(self, host: str, attempt: int) -> _Life | None:
        return next((life for life in self._lives(host) if life.attempt == attempt), None)

    def _lives(self, host: str) -> list[_Life]:
        """The attempts at a host, or at all, of which there is a folder."""
        found = []
        for folder in self._hosts.glob(f"{host}-a*"):
            name, _, attempt = folder.name.rpartition("-a")
            if not attempt.isdigit() or host not in ("*", name):
                continue
            life = self._new(name, int(attempt))
            try:
                written = json.loads((folder / _STATE).read_text(encoding="utf-8"))
                leader = Process(int(written["pid"]), int(written["start_ticks"]))
            except (OSError, ValueError, KeyError, TypeError):
                leader = None  # taken down, or its starter was killed before it could write
            found.append(_Life(name, int(attempt), folder, Tree(leader, life.tree.mark)))
        return found


def _tidy(folder: Path) -> None:
    """Remove what an ended host needs no more: its secrets, and the socket of an agent that could not do that."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        agent_socket = Path(json.loads((folder / "agent.json").read_text(encoding="utf-8"))["socket"])
        for left in agent_socket.parent.glob("*.sock"):  # a head has four
            left.unlink(missing_ok=True)
        if agent_socket.parent != folder and agent_socket.parent.name.startswith("sky-monarch-"):
            agent_socket.parent.rmdir()
    for name in ("private.json", _STATE):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _end_of(code: int | None) -> str:
    if code is None:
        return "ended"
    if code > _SIGNALLED:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(code - _SIGNALLED).name}"
    return f"ended with code {code}"


def _reap(descriptor: int) -> int | None:
    """The exit code of a child that has ended, as a shell has it; None of one that another process started."""
    try:
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else _SIGNALLED + ended.si_status


def _pids(processes: Sequence[Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)
