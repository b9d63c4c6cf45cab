"""Peer ``torchrun``: elastic restarts of everybody from a checkpoint; its ranks stand for the groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence

from benches.recovery.analysis import Kill
from benches.recovery.events import Follower, log_path
from benches.recovery.peers import Setting, environment, program

_STOP_LIMIT_S = 20.0


class Torchrun:
    """One ``torchrun --max-restarts``."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._followers = [Follower(log_path(setting.folder, group, 0)) for group in range(setting.groups)]
        self._killed = 0

    def start(self) -> None:
        """Start it."""
        executable = program("torchrun")
        assert executable is not None
        with (self._setting.folder / "torchrun.output").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    executable,
                    "--nnodes=1",
                    f"--nproc-per-node={self._setting.groups}",
                    f"--max-restarts={self._setting.kills + 8}",
                    "--master-addr=127.0.0.1",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=127.0.0.1:0",
                    "-m",
                    "benches.recovery.train_torchrun",
                    f"--folder={self._setting.folder}",
                ],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def warm_up(self) -> bool:
        """Nothing to wait for."""
        return True

    def aim(self, groups: Collection[int]) -> None:
        """Nothing to do: the ranks' logs hold their pids."""

    def kill(self, group: int) -> frozenset[int]:
        """SIGKILL one rank; torchrun ends and restarts all."""
        self._followers[group].poll()
        pid = self._followers[group].events[-1]["pid"]
        os.kill(pid, signal.SIGKILL)
        self._killed += 1
        return frozenset({pid})

    def tend(self) -> None:
        """Nothing to do, unless it gave up."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"torchrun ended with {self._process.returncode}")

    def kill_lighthouse(self) -> None:
        """It has none."""
        raise NotImplementedError

    def restarts(self) -> int:
        """Processes beyond the first of each rank."""
        for follower in self._followers:
            follower.poll()
        pids = [{event["pid"] for event in follower.events} for follower in self._followers]
        return sum(len(each) - 1 for each in pids)

    def observe(self) -> None:
        """Nothing to do."""

    def false_drops(self, kills: Sequence[Kill]) -> None:  # noqa: ARG002
        """It has no quorums."""
        return

    def notes(self) -> Mapping[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """SIGTERM, which ends its ranks."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for follower in self._followers:  # nobody ends them now
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(follower.events[-1]["pid"], signal.SIGKILL)
