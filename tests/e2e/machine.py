"""Machines made of namespaces: each has its own name, processes and mounts; network, kernel and disk are shared.

Nothing of one can be left behind: its processes are those of one PID namespace, which the kernel ends with its
first process, and its mounts are seen by nobody else. The first process dies with whoever started the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes import pids
from tests.support.waiting import eventually

_NAMESPACES = [
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"),
]


class Machine:
    """One machine, from its making on.

    Args:
        name: For people, and its log.
        script: What its first process, a bash, does; the machine is gone when that ends.
        log: Where its output goes.
        env: Its environment.

    Attributes:
        name: Its name.
        log: Its log.
    """

    def __init__(self, name: str, script: str, *, log: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [*_NAMESPACES, "bash", "-euc", script],
                cwd="/",  # a Python started there finds nothing of this tree
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self._keeper.poll() is None

    @property
    def first(self) -> int | None:
        """Its first process, as this machine numbers it; None before there is one and after the end."""
        if not self.runs:
            return None
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        with contextlib.suppress(OSError):
            return next(map(int, children.read_text().split()), None)
        return None

    def processes(self) -> dict[int, int]:
        """Every process in it: its number here, and its number in there."""
        first = self.first
        found = {}
        with contextlib.suppress(OSError):
            own = Path(f"/proc/{first}/ns/pid").readlink()
            for pid in pids():
                with contextlib.suppress(OSError, StopIteration):
                    if Path(f"/proc/{pid}/ns/pid").readlink() == own:
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        numbers = next(line for line in lines if line.startswith("NSpid:"))
                        found[pid] = int(numbers.split()[-1])
        return found

    def kill(self, *, wait: bool = True) -> None:
        """End it at once, as a power cut does: returns when none of its processes is left, or at once."""
        if self.runs:
            first = eventually(lambda: self.first or not self.runs, within_s=5, what=f"{self.name} begins")
            if self.runs:
                # The kernel lets go of the first process only after all the others of its namespace.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)
        if wait:
            self._keeper.wait(timeout=30)

    def end_of_log(self, lines: int = 20) -> str:
        """What it said last."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
