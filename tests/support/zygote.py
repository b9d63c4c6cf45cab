"""One process that has imported torch, and forks ranks of it: all tests together pay for the import once.

Run as ``python -m tests.support.zygote``; :class:`Zygote` is the tests' end of it. Forking is safe here: the
parent never starts a thread: no collective, no Tokio runtime, no backward pass.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.support.processes import send
from tests.support.waiting import PATIENCE

REPO = Path(__file__).parents[2]


class Child:
    """A forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._ended = threading.Event()

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        if self.code is None:
            send([self.pid], signum)  # it may have ended this moment

    def wait(self, within_s: float) -> int:
        """Exit code, negative for a signal."""
        assert self._ended.wait(within_s * PATIENCE), f"process {self.pid} still runs after {within_s} s"
        assert self.code is not None
        return self.code


class Zygote:
    """Forks children that call one function."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stderr = (folder / "zygote.log").open("wb")
        self._log_from = 0
        # Not the working folder first: a test of a mutant puts its package there.
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=REPO,
            env=env,
            text=True,
        )
        self._children: dict[int, Child] = {}
        self._born: list[Child] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, call: str, *arguments: Any, within_s: float = 90, **env: object) -> Child:
        """Run ``module:function`` with ``arguments`` (JSON) and ``env`` in a new process."""
        assert self._process.stdin is not None
        line = json.dumps({"call": call, "arguments": arguments, "env": {k: str(v) for k, v in env.items()}})
        with self._changed:
            before = len(self._born)
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: len(self._born) > before, within_s), (
                "the zygote does not fork"
            )
            return self._born[-1]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            with self._changed:
                if "code" in news:
                    child = self._children.pop(news["pid"])  # its number may be given out again
                    child.code = news["code"]
                    child._ended.set()
                else:
                    self._children[news["pid"]] = child = Child(news["pid"])
                    self._born.append(child)
                self._changed.notify_all()

    def log(self) -> str:
        """What the children wrote to stderr, since the last :meth:`begin`."""
        return (self.folder / "zygote.log").read_bytes()[self._log_from :].decode(errors="replace")

    def begin(self) -> None:
        """End what others have left, and forget what it said."""
        self.end_children()
        self._log_from = (self.folder / "zygote.log").stat().st_size

    def end_children(self) -> None:
        with self._changed:
            left = list(self._children.values())
        for child in left:
            child.kill(signal.SIGKILL)
        for child in left:
            child.wait(10)

    def close(self) -> None:
        self.end_children()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


def _run(job: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(job["env"])
    module, _, function = job["call"].partition(":")
    try:
        getattr(importlib.import_module(module), function)(*job["arguments"])
    except SystemExit as leave:
        return int(leave.code or 0)
    except BaseException:  # noqa: BLE001  # the child's last words
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import sky_monarch.training.session

    assert sky_monarch.training.session is not None
    alive: set[int] = set()
    pending = b""
    while True:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(2, 1)
                code = _run(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
                # As at the end of a script, so that what hangs or crashes there is seen.
                sys.exit(code)
            alive.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
    send(alive, signal.SIGKILL)


if __name__ == "__main__":
    main()
