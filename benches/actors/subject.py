"""The bench's end of a peer: its process, and what it costs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.actors import tree

ROOT = Path(__file__).parents[2]
_OURS = "sky-monarch"
_SETTLE = "settle"
_PATIENCE_S = 150.0
_CLOSING_S = 20.0
_KILLING_S = 20.0


class PeerError(RuntimeError):
    """A peer is missing, or could not do what was asked of it."""


class Subject:
    """One peer in a process of its own.

    Args:
        name: Which one.
        folder: An empty one, for what it writes.
        seconds: About how long a timed loop goes on.

    Raises:
        PeerError: It is not installed, or does not start.
    """

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.name = name
        self._log = folder / "log"
        interpreter = [*_alone(name), str(_python(name))]
        mine, its = socket.socketpair()
        with its, self._log.open("w") as log:
            command = [*interpreter, "-m", "benches.actors.serving", name, str(its.fileno()), str(seconds)]
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", str(ROOT / "benches/actors/keeper.py"), *command],
                cwd=ROOT,
                env=_environment(folder),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        mine.settimeout(_PATIENCE_S)
        self._channel = mine
        self._lines = mine.makefile("r")
        self._busy = True
        try:
            self.version = self._answer()["version"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process at the top of its tree."""
        return self._keeper.pid

    def measure(self, figure: str, **options: Any) -> dict[str, Any]:
        """Let it prepare and time one figure.

        Returns:
            The sample of its loop, and with it ``cpu_s``, which the tree has spent on the timed part.

        Raises:
            PeerError: It could not, or did not answer in time.
        """
        self._say({"figure": figure, **options})
        self._answer()
        before_s = tree.cpu_s(self.pid)
        self._say("go")
        sample = self._answer()
        sample["cpu_s"] = tree.cpu_s(self.pid) - before_s
        return sample

    def settle(self) -> None:
        """What the last figure has started may end now."""
        self._say(_SETTLE)

    def close(self) -> None:
        """End the peer, and whatever it has left: in its own way where it waits for a request, else at once."""
        self._lines.close()
        self._channel.close()
        try:
            if not self._busy:
                self._keeper.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._keeper.terminate()
            self._keeper.wait(_KILLING_S)

    def _say(self, what: Any) -> None:
        self._busy = what != _SETTLE
        try:
            self._channel.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise PeerError(f"{self.name} has ended: {error}{self._tail()}") from error

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise PeerError(f"{self.name} has not answered in {_PATIENCE_S:.0f} s{self._tail()}") from error
        if not line:
            raise PeerError(f"{self.name} has ended{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        self._busy = False
        if "missing" in answer:
            raise PeerError(f"{self.name} is missing: {answer['missing']}. Fix: make peers")
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "".join(f"\n  | {line}" for line in lines)


def _python(name: str) -> Path:
    """The interpreter of a peer's environment.

    Raises:
        PeerError: There is no such environment.
    """
    if name == _OURS:
        return Path(sys.executable)
    found = Path(os.environ.get("SKY_MONARCH_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))
    if not found.exists():
        raise PeerError(f"{name} is missing: there is no {found}. Fix: make peers")
    return found


def _alone(name: str) -> list[str]:
    """Ray takes the host's own address instead of loopback where it finds one: it gets a network without any."""
    if name != "ray" or not shutil.which("unshare"):
        return []
    command = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return [*command, "--"] if allowed else []


def _environment(folder: Path) -> dict[str, str]:
    """A peer's: what it leaves behind goes to ``folder``, and it finds the actors' modules."""
    return {
        **os.environ,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
