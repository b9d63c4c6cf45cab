"""What is asked of each peer, which figures its samples give, and what ours are to reach: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, float]
OURS = "sky-monarch"
#: In the names of what is measured between hosts.
TLS = "tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing to measure.

    Attributes:
        name: As on the command line.
        loop: Of `Loops`.
        options: Of the loop.
        only: The one peer that has it; all have, where it is empty.
        values: From its sample to what is reported; the median over the rounds is.
        units: Of the values.
    """

    name: str
    loop: str
    values: Callable[[Mapping[str, Any]], Values]
    units: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """How one of our values is to stand to a peer's: a ratio of at most, or of at least, so much.

    Attributes:
        value: Of ours and of the peer's.
        peer: Which one.
        most: Where less is better.
        least: Where more is.
    """

    value: str
    peer: str
    most: float | None = None
    least: float | None = None

    def verdict(self, low: float, high: float) -> str:
        """Whether the interval of the ratio lies on the right side."""
        if self.most is not None:
            return "met" if high <= self.most else "missed" if low > self.most else "unsure"
        assert self.least is not None
        return "met" if low >= self.least else "missed" if high < self.least else "unsure"

    def __str__(self) -> str:
        return f"at most {self.most}" if self.most is not None else f"at least {self.least}"


def _latency(loop: str, over: str = "", only: str = "") -> Figure:
    name = f"{loop}_{over}" if over else loop

    def values(sample: Mapping[str, Any]) -> Values:
        return {
            f"{name}_us": sample["p50_us"],
            f"{name}_us_p99": sample["p99_us"],
            f"{name}_us_min": sample["min_us"],
            f"{name}_cpu_us": sample["cpu_s"] / sample["operations"] * 1e6,
        }

    names = (f"{name}_us", f"{name}_us_p99", f"{name}_us_min", f"{name}_cpu_us")
    options = {"over": over} if over else {}
    units = dict.fromkeys(names, "us")
    return Figure(name=f"{name}_us", loop=loop, values=values, units=units, options=options, only=only)


def _rate(name: str, unit: str) -> Figure:
    def values(sample: Mapping[str, Any]) -> Values:
        return {
            f"{name}_per_s": sample["operations"] / sample["wall_s"],
            f"{name}_cpu_us": sample["cpu_s"] / sample["operations"] * 1e6,
        }

    units = {f"{name}_per_s": f"{unit}/s", f"{name}_cpu_us": "us"}
    return Figure(name=f"{name}_per_s", loop=name, values=values, units=units)


def _spawn(name: str, wall: str, processes: int) -> Figure:
    cpu = f"{wall.removesuffix('_s')}_cpu_s"

    def values(sample: Mapping[str, Any]) -> Values:
        found = {wall: sample["wall_s"], cpu: sample["cpu_s"]}
        if "private_MiB" in sample:
            found["scale_private_MiB"] = sample["private_MiB"]
        return found

    units = {wall: "s", cpu: "s", "scale_private_MiB": "MiB"}
    return Figure(name=name, loop="spawn_mesh", values=values, units=units, options={"processes": processes})


def _payload(name: str, kind: str, way: str, over: str = "", only: str = "") -> Figure:
    return Figure(
        name=name,
        loop="payload",
        values=lambda sample: {name: sample["GBps"], f"{name}_cpu_s": sample["cpu_s"] / sample["operations"]},
        units={name: "GB/s", f"{name}_cpu_s": "s"},
        options={"kind": kind, "way": way} | ({"over": over} if over else {}),
        only=only,
    )


#: In turns, round by round. The names are those of the table of issue 6.
IN_TURNS = (
    _latency("rtt_call"),
    _rate("msgs", "message"),
    _rate("pipelined_calls", "call"),
    _latency("fanout"),
    _spawn("spawn_mesh_s", "spawn_mesh_s", 8),
    _payload("payload_oneway_GBps", "numpy", "oneway"),
    _payload("payload_GBps", "bytes", "echo"),
    _payload("payload_numpy_GBps", "numpy", "echo"),
    _payload("payload_oneway_bytes_GBps", "bytes", "oneway"),
    _payload("payload_tensor_GBps", "tensor", "echo", only=OURS),
    _payload("payload_oneway_tensor_GBps", "tensor", "oneway", only=OURS),
    _latency("rtt_call", TLS, OURS),
    _latency("fanout", TLS, OURS),
    _payload("payload_oneway_tls_GBps", "numpy", "oneway", TLS, OURS),
    _payload("payload_tensor_tls_GBps", "tensor", "echo", TLS, OURS),
)
SCALE = _spawn("scale", "scale_spawn_s", 32)
#: How many die at once. What is said of them is told apart by the same suffix.
DEATHS = {"failure_detect_ms": 1, "failure_detect_ms_8": 8}
NAMES = (*(figure.name for figure in IN_TURNS), SCALE.name, *DEATHS)

BARS = (
    Bar(value="rtt_call_cpu_us", peer="monarch", most=0.15),
    Bar(value="rtt_call_us", peer="monarch", most=0.2),
    Bar(value="msgs_cpu_us", peer="monarch", most=0.2),
    Bar(value="pipelined_calls_per_s", peer="monarch", least=6),
    Bar(value="fanout_cpu_us", peer="monarch", most=0.25),
    Bar(value="fanout_us", peer="monarch", most=0.25),
    Bar(value="spawn_mesh_cpu_s", peer="monarch", most=0.7),
    Bar(value="payload_oneway_GBps", peer="ray", least=1.2),
    Bar(value="payload_oneway_GBps", peer="monarch", least=6),
    *(Bar(value="payload_GBps", peer=peer, least=2) for peer in ("monarch", "ray")),
    *(Bar(value="scale_spawn_cpu_s", peer=peer, most=0.5) for peer in ("monarch", "ray")),
    *(Bar(value="scale_private_MiB", peer=peer, most=0.5) for peer in ("monarch", "ray")),
)
#: Of ours alone, in ms: whatever the peers need, this is what a user waits.
DETECT_P99_MS = 20.0
RECOVER_MS = 500.0
