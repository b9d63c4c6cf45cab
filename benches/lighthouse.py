"""A thousand managers at our lighthouse and at TorchFT's own: quorum latency, CPU, memory.

Each manager is a connection of its own that beats once a second; all of them ask for a quorum again and again, in
two ways. `burst`: all at once, from the first ask to the last answer. `straggler`: all but one, and a second later
the last, from that ask to the last answer, so that only the decision and its spreading count. The two lighthouses
take turns under the same driver. Ours runs as in a job, with the token and its state file; TorchFT's without its
log, which would cost it more.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from benches.managers import Farm, members_of
from benches.report import emit, emit_distribution

MANAGERS = int(os.environ.get("SKY_MONARCH_BENCH_MANAGERS", "1000"))
TURNS = int(os.environ.get("SKY_MONARCH_BENCH_TURNS", "3"))
QUORUMS_A_TURN = 4  # of each kind
STEADY_S = 5.0
HEARTBEAT_S = 1.0
_SETTLE_S = 1.0
_PATIENCE_S = 60.0
_TOKEN = "token-of-the-bench"
_TICKS = os.sysconf("SC_CLK_TCK")
Kind = Literal["sky-monarch", "torchft"]


class Lighthouse:
    """One lighthouse process and its managers, with what was measured of it."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        # Nobody falls silent while the other one has its turn.
        config: dict[str, object] = {"run_id": "bench", "kind": kind, "listen": address}
        config |= {"min_replicas": MANAGERS, "heartbeat_timeout_s": 300, "join_timeout_s": 300}
        if kind == "sky-monarch":
            (folder / "private.json").write_text(json.dumps({"token": _TOKEN}))
            config |= {"private": str(folder / "private.json"), "state": str(folder / "lighthouse.state")}
        path = folder / f"{kind}.json"
        path.write_text(json.dumps(config))
        with (folder / f"{kind}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sky_monarch.lighthouse", str(path)],
                stderr=log,
                # TorchFT's would write a line for each ask, and all members with each quorum
                env={**os.environ, "RUST_LOG": "error"},
            )
        self.step = 0
        self.burst_s: list[float] = []
        self.straggler_s: list[float] = []
        self.steady_s = self.steady_cpu_s = 0.0
        self.steady_beats = 0
        self.quorum_cpu_s: list[float] = []
        try:
            _wait_for(address)
            identity = "r{}.g1." + _TOKEN + "@" if kind == "sky-monarch" else ""
            addresses = [identity.format(number) + address for number in range(MANAGERS)]
            self.farm = Farm(addresses, HEARTBEAT_S)
            self.quorum(straggler=False)  # the first one is a start, which is decided otherwise
        except BaseException:
            sys.stderr.write((folder / f"{kind}.log").read_text(errors="replace")[-2000:])
            self.end()
            raise

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mib(self, key: str) -> float:
        """One line of the process's status."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{key}:")[2].split()[0]) / 1024

    def take_turn(self) -> None:
        """A while of heartbeats, then quorums of both kinds alternately."""
        self.farm.resume()
        self.farm.drive(_SETTLE_S)
        self.farm.beats_s = self.farm.beats_s[: self.steady_beats]
        cpu_s, start_s = self.cpu_s(), time.monotonic()
        self.farm.drive(STEADY_S)
        self.steady_cpu_s += self.cpu_s() - cpu_s
        self.steady_s += time.monotonic() - start_s
        self.steady_beats = len(self.farm.beats_s)
        for _ in range(QUORUMS_A_TURN):
            self.burst_s.append(self.quorum(straggler=False))
            self.straggler_s.append(self.quorum(straggler=True))

    def quorum(self, *, straggler: bool) -> float:
        """Have one formed of all managers; returns its latency."""
        self.step += 1
        farm = self.farm
        farm.lengths.clear()
        cpu_s, start_s = self.cpu_s(), time.monotonic()
        beats = len(farm.beats_s)
        last = farm.managers[-1]
        for manager in farm.managers:
            if straggler and manager is last:
                farm.drive(_SETTLE_S)
                if farm.lengths:
                    raise RuntimeError(f"{self.kind}: a quorum formed without a live member")
                start_s = time.monotonic()
            manager.ask(self.step)
        if not farm.drive(_PATIENCE_S, lambda: len(farm.lengths) == MANAGERS):
            raise RuntimeError(f"{self.kind}: {len(farm.lengths)} of {MANAGERS} were answered")
        took_s = time.monotonic() - start_s
        farm.drive(_SETTLE_S)  # whatever the quorum leaves to do is a part of its cost
        beating_s = (len(farm.beats_s) - beats) * self.beat_cpu_s()
        self.quorum_cpu_s.append(self.cpu_s() - cpu_s - beating_s)
        answer = bytes(farm.managers[0].kept[5:])
        if set(farm.lengths) != {len(answer)} or members_of(answer) != MANAGERS:
            raise RuntimeError(f"{self.kind}: the answers differ, or lack members")
        return took_s

    def beat_cpu_s(self) -> float:
        """CPU seconds that one heartbeat costs, with everything that goes on beside it."""
        return self.steady_cpu_s / self.steady_beats if self.steady_beats else 0.0

    def figures(self, load: str) -> dict[str, float]:
        """Print everything and return what is worth comparing."""
        figures: dict[str, float] = {}
        for name, values in (("burst", self.burst_s), ("straggler", self.straggler_s)):
            summary = emit_distribution(
                self.kind, f"quorum_{name}", [v * 1000 for v in values], "ms", load=load
            )
            figures |= {f"quorum_{name}_{key}": summary[key] for key in ("p50", "max")}
        steady = [value * 1000 for value in self.farm.beats_s[: self.steady_beats]]
        summary = emit_distribution(self.kind, "heartbeat", steady, "ms", load=load)
        figures |= {f"heartbeat_{key}": summary[key] for key in ("p50", "p99")}
        own = {
            # the very first quorum is a start, and came before any figure of heartbeats
            "quorum_cpu": (statistics.mean(self.quorum_cpu_s[1:]), "s"),
            "thousand_heartbeats_cpu": (1000 * self.beat_cpu_s(), "s"),
            "steady_cpu": (100 * self.steady_cpu_s / self.steady_s, "% of a core"),
            "rss": (self.memory_mib("VmRSS"), "MiB"),
            "rss_peak": (self.memory_mib("VmHWM"), "MiB"),
        }
        for name, (value, unit) in own.items():
            emit(self.kind, name, value, unit, load=load)
            figures[name] = value
        return figures

    def end(self) -> None:
        """Close the connections and end the process."""
        if hasattr(self, "farm"):
            self.farm.close()
        self.process.kill()
        self.process.wait()


def _wait_for(address: str) -> None:
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def run() -> None:
    """Measure both and print the ratios, ours to TorchFT's: below 1 is better."""
    load = f"{MANAGERS} managers, a heartbeat every {HEARTBEAT_S:g} s each, quorums of all"
    peers: list[Lighthouse] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            kinds: tuple[Kind, Kind] = ("torchft", "sky-monarch")
            for kind in kinds:  # one by one, so that the first is ended if the second does not start
                peers += [Lighthouse(kind, Path(folder))]
            began_s = time.process_time()
            for _ in range(TURNS):
                for peer in peers:
                    peer.take_turn()
            own_s = time.process_time() - began_s
            theirs, ours = (peer.figures(load) for peer in peers)
        finally:
            for peer in peers:
                peer.end()
    emit("driver", "cpu", own_s, "s", load=load)
    for figure, value in ours.items():
        emit("sky-monarch", f"{figure}_ratio", value / theirs[figure], "ratio", load=load)
