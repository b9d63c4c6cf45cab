"""Hosts of actors as somebody starts them by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.runs import ROOT

LIMIT_S = 30


class Served:
    """``sky-monarch actor-host --listen``.

    Attributes:
        address: ``host:port`` where it listens.
    """

    def __init__(self, keys: Path, *options: str) -> None:
        argv = ["actor-host", "--listen", "127.0.0.1:0", "--keys", str(keys), "--name", keys.stem, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sky_monarch", *argv],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stderr is not None
        self.said = [self.process.stderr.readline()]
        self.address = self.said[0].rpartition(" ")[2].strip()

    def end(self) -> str:
        """End it; returns what it has said."""
        self.process.terminate()
        _, rest = self.process.communicate(timeout=LIMIT_S)
        return "".join(self.said) + rest
