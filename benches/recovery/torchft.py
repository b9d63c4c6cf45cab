"""Peers ``torchft-*``: TorchFT 0.2 with its own lighthouse; this process is the supervisor that restarts at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.recovery import analysis
from benches.recovery.peers import Setting, environment, free_port, program

# TorchFT's default is 60 s, and a stall of its ring takes that long: 5 s are kind to it. With much state they are not:
# survivors wait in an allreduce for a newcomer that heals, which may take longer.
_TIMEOUT_S, _TIMEOUT_WITH_STATE_S = 5.0, 30.0
_DEATH_LIMIT_S = 10.0
_IMPORT_LIMIT_S = 180.0
_FORK_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a TorchFT peer is set.

    Attributes:
        lighthouse: Options of ``torchft_lighthouse``; none: its defaults (5 s without a heartbeat).
        heartbeat_ms: Between two beats of a manager.
        warm: Restarts are forked from a process that has imported everything.
        ask_first: Ranks ask for the quorum before they compute, not after.
    """

    lighthouse: tuple[str, ...] = ()
    heartbeat_ms: int = 100
    warm: bool = False
    ask_first: bool = False


_FAST = ("--heartbeat_timeout_ms=250", "--join_timeout_ms=250", "--quorum_tick_ms=10")
TUNINGS: Mapping[str, Tuning] = {
    "torchft-default": Tuning(),
    "torchft-tuned": Tuning(lighthouse=_FAST, heartbeat_ms=25, warm=True),
    "torchft-tuned-asks-first": Tuning(lighthouse=_FAST, heartbeat_ms=25, warm=True, ask_first=True),
}


class Process:
    """A rank, whoever its parent is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it is over, waiting up to so long."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Forget an ended process."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


class TorchFT:
    """A lighthouse, its groups, and where it is warm a fork server."""

    def __init__(self, setting: Setting, tuning: Tuning) -> None:
        self._setting, self._tuning = setting, tuning
        self._env = environment()
        self._port = free_port()
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._fork_server: subprocess.Popen[str] | None = None
        self._ranks: dict[int, list[Process]] = {}
        self._restarts = 0

    def start(self) -> None:
        """Start lighthouse and groups, where it is warm from a fork server."""
        self._start_lighthouse()
        if self._tuning.warm:
            self._fork_server = subprocess.Popen(
                [sys.executable, "-m", "benches.recovery.fork_server"],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            answer = self._answer(self._fork_server, _IMPORT_LIMIT_S)
            if answer != "ready":
                raise RuntimeError(f"the fork server did not start: {answer!r}")
        for group in range(self._setting.groups):
            self._ranks[group] = self._start_group(group)

    def warm_up(self) -> bool:
        """Nothing to wait for: the fork server was there first."""
        return True

    def aim(self, groups: Collection[int]) -> None:
        """Nothing to do: the ranks are this process's own."""

    def kill(self, group: int) -> frozenset[int]:
        """SIGKILL its ranks and start them anew as soon as they are dead."""
        pids = frozenset(rank.pid for rank in self._ranks[group])
        self._replace(group)
        return pids

    def tend(self) -> None:
        """Start groups anew of which a rank crashed."""
        for group, ranks in self._ranks.items():
            if any(rank.ended() for rank in ranks):
                self._replace(group)

    def pid(self, group: int) -> int:
        """Of a group's first rank."""
        return self._ranks[group][0].pid

    @property
    def lighthouse_pid(self) -> int:
        """Of the lighthouse that runs now."""
        assert self._lighthouse is not None
        return self._lighthouse.pid

    def kill_lighthouse(self) -> None:
        """SIGKILL it and start it anew on the same port."""
        assert self._lighthouse is not None
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._start_lighthouse()

    def restarts(self) -> int:
        """Counted here."""
        return self._restarts

    def observe(self) -> None:
        """Nothing to do: its log forgets nothing."""

    def false_drops(self, kills: Sequence[analysis.Kill]) -> int:  # noqa: ARG002
        """Wire ids that left a quorum and came back, by the lighthouse's own log."""
        return analysis.came_back(analysis.parse_torchft_quorums(self._log.read_text(errors="replace")))

    def notes(self) -> Mapping[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """SIGKILL everything."""
        for rank in (rank for ranks in self._ranks.values() for rank in ranks):
            rank.kill()
            rank.ended(_DEATH_LIMIT_S)
            rank.close()
        self._ranks = {}
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.communicate()
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()

    @property
    def _log(self) -> Path:
        return self._setting.folder / "lighthouse.log"

    def _start_lighthouse(self) -> None:
        executable = program("torchft_lighthouse")
        assert executable is not None
        with self._log.open("ab") as log:
            self._lighthouse = subprocess.Popen(
                [executable, f"--bind=127.0.0.1:{self._port}", "--min_replicas=1", *self._tuning.lighthouse],
                env={**self._env, "RUST_LOG": "info"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _replace(self, group: int) -> None:
        for rank in self._ranks[group]:
            rank.kill()
        for rank in self._ranks[group]:
            if not rank.ended(_DEATH_LIMIT_S):
                raise RuntimeError(f"process {rank.pid} survived SIGKILL")
            rank.close()
        self._ranks[group] = self._start_group(group)
        self._restarts += 1

    def _start_group(self, group: int) -> list[Process]:
        setting = self._setting
        store_port = free_port() if setting.ranks > 1 else 0
        start = self._spawn if self._fork_server is None else self._fork
        processes = []
        for rank in range(setting.ranks):
            argv = [
                f"--folder={setting.folder}",
                f"--group={group}",
                f"--rank={rank}",
                f"--ranks={setting.ranks}",
                f"--store-port={store_port}",
                f"--lighthouse=http://127.0.0.1:{self._port}",
                f"--heartbeat-ms={self._tuning.heartbeat_ms}",
                f"--collective-timeout-s={_TIMEOUT_WITH_STATE_S if setting.state_gib else _TIMEOUT_S}",
                f"--state-gib={setting.state_gib}",
                f"--task={setting.task}",
                f"--block={setting.block}",
                *(["--ask-first"] if self._tuning.ask_first else []),
            ]
            output = setting.folder / f"g{group}r{rank}.output"
            processes.append(Process(start(argv, output)))
        return processes

    def _spawn(self, argv: Sequence[str], output: Path) -> int:
        with output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "benches.recovery.train_torchft", *argv],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            ).pid

    def _fork(self, argv: Sequence[str], output: Path) -> int:
        server = self._fork_server
        assert server is not None
        assert server.stdin is not None
        server.stdin.write(json.dumps({"argv": argv, "output": str(output)}) + "\n")
        server.stdin.flush()
        return int(self._answer(server, _FORK_LIMIT_S))

    @staticmethod
    def _answer(server: subprocess.Popen[str], within_s: float) -> str:
        """The fork server's next line; it says one only when asked, so nothing is buffered."""
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], within_s)[0]:
            raise RuntimeError(f"the fork server was silent for {within_s:g} s")
        return server.stdout.readline().strip()
