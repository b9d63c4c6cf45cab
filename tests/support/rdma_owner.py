"""A process that owns memory, told by lines of JSON on stdin; run as ``python -m tests.support.rdma_owner``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import is_stopped, threads_of
from tests.support.waiting import eventually

REPO = Path(__file__).parents[2]
SECRET = "the secret of the tests"


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes in which each place can be told from its neighbours."""
    block = bytes((index * 31 + index // 256 * 7 + seed) % 256 for index in range(65_521))
    return (block * (nbytes // len(block) + 1))[:nbytes]


class Owner:
    """The tests' end of such a process.

    Args:
        nbytes: Of its memory, which holds ``pattern(nbytes, seed)``.
        seed: Of the pattern.
        kind: ``bytes`` or ``shared``.
        writable: Whether it may be written to.
        epoch: Of the handle.
        bytes_per_s: Limit of what leaves; none may then read by itself.
    """

    def __init__(
        self,
        nbytes: int = 1 << 20,
        *,
        seed: int = 0,
        kind: str = "bytes",
        writable: bool = True,
        epoch: int = 1,
        bytes_per_s: int | None = None,
    ) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.rdma_owner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            cwd=REPO,
            text=True,
        )
        self.nbytes = nbytes
        self.handle: str = self.ask(
            do="make",
            nbytes=nbytes,
            seed=seed,
            kind=kind,
            writable=writable,
            epoch=epoch,
            bytes_per_s=bytes_per_s,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self, within_s: float = 30.0) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], within_s)
        assert ready, "the owner does not answer"
        return json.loads(self.process.stdout.readline())

    def ask(self, **words: Any) -> Any:
        self.tell(**words)
        return self.hear()

    def stop(self) -> None:
        """Let it stand still, and see that it does."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(self.pid), what="it stands still")

    @property
    def serves(self) -> bool:
        """Whether anybody is connected to it."""
        return "rdma-serve" in threads_of(self.pid)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    from sky_monarch import _core
    from sky_monarch.errors import SkyMonarchError
    from sky_monarch.rdma import Domain, RDMABuffer

    domain = buffer = None
    data: Any = b""
    for line in sys.stdin:
        words = json.loads(line)
        answer: Any = None
        if words["do"] == "make":
            domain = Domain(SECRET, bytes_per_s=words["bytes_per_s"])
            data = (
                _core.SharedBuffer(words["nbytes"])
                if words["kind"] == "shared"
                else bytearray(words["nbytes"])
            )
            memoryview(data)[:] = pattern(words["nbytes"], words["seed"])
            buffer = RDMABuffer(data, domain=domain, epoch=words["epoch"], writable=words["writable"])
            answer = buffer.handle
        elif words["do"] == "bytes":
            answer = bytes(memoryview(data)[words["at"] : words["at"] + words["length"]]).hex()
        elif words["do"] == "drop":
            assert buffer is not None
            try:
                buffer.drop(timeout=words["timeout_s"])
            except SkyMonarchError as error:
                answer = type(error).__name__
        elif words["do"] == "modules":
            answer = sorted(sys.modules)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
