"""What ``amd-smi`` says of the cards: errors of memory, throttling, partitions.

Its output is no interface that is kept: keys moved between ROCm 6 and 7, values are numbers, ``{"value", "unit"}`` or
``"N/A"``. What is not there, or not understood, is not said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sky_monarch.doctor.devices import Device
from sky_monarch.doctor.finding import Finding, error, info, ok, warning

__all__ = ["METRIC", "STATIC", "check"]

METRIC = "amd-smi metric --json"
STATIC = "amd-smi static --json"

#: What slows a card down for its own protection. Others of the kind only say that it has nothing to do.
_THROTTLES = {
    "prochot": "the board says that it is too hot (PROCHOT)",
    "ppt": "its power limit",
    "socket_thermal": "its temperature",
    "vr_thermal": "the temperature of its voltage regulators",
    "hbm_thermal": "the temperature of its memory",
}


def check(found: Sequence[Device], tools: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is known from ``amd-smi`` alone, or that it knows better than the kernel's files."""
    metrics, statics = _cards(tools.get(METRIC, "")), _cards(tools.get(STATIC, ""))
    if not metrics and not statics:
        if METRIC in tools:
            yield info("gpu.smi", "amd-smi says nothing that is understood here")
        return
    yield from _memory(metrics)
    yield from _throttling(metrics)
    yield from _partitions(statics)
    cards = len({device.pci for device in found})
    listed = len(metrics or statics)
    if listed not in (cards, len(found)):
        yield warning(
            "gpu.smi",
            f"amd-smi lists {listed} card(s) and the kernel {cards}",
            "compare `amd-smi list` with /sys/class/kfd/kfd/topology/nodes: one of them does not answer",
        )


def _cards(text: str) -> list[Mapping[str, Any]]:
    """One map a card: a list of them as ROCm 6 prints it, or in ``gpu_data`` as ROCm 7 does."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(told, Mapping):
        told = told.get("gpu_data")
    return [one for one in told if isinstance(one, Mapping)] if isinstance(told, list) else []


def _section(card: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = card.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: object) -> int:
    if isinstance(value, Mapping):
        value = value.get("value")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _who(card: Mapping[str, Any]) -> str:
    return f"card {card.get('gpu', '?')} of amd-smi"


def _memory(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    counted = bad = False
    for card in metrics:
        ecc = _section(card, "ecc")
        counted = counted or isinstance(ecc.get("total_uncorrectable_count"), int)
        wrong, late = _number(ecc.get("total_uncorrectable_count")), _number(ecc.get("total_deferred_count"))
        bad = bad or bool(wrong or late)
        if wrong:
            blocks = _section(card, "ecc_blocks")
            where = [name for name in blocks if _number(_section(blocks, name).get("uncorrectable_count"))]
            yield error(
                "gpu.ecc",
                f"{_who(card)} counts {wrong} uncorrectable error(s)"
                + (f" in {', '.join(where)}" if where else "")
                + ": results may be wrong, or it resets",
                "reset it (`amd-smi reset --gpureset`) and replace it when they come again",
            )
        elif late:
            yield warning(
                "gpu.ecc",
                f"{_who(card)} counts {late} deferred error(s): what lies there is damaged and was not read yet",
                "reset it (`amd-smi reset --gpureset`) before it is; replace it when they come again",
            )
    if counted and not bad:
        yield ok("gpu.ecc", "amd-smi counts no uncorrectable error")


def _throttling(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for card in metrics:
        throttle = _section(card, "throttle")
        active = [
            words
            for name, words in _THROTTLES.items()
            if str(throttle.get(f"{name}_violation_status")).upper() == "ACTIVE"
        ]
        # MI200 and older have no such section, and one word for all reasons.
        if str(_section(card, "power").get("throttle_status")).upper() == "THROTTLED":
            active.append("one of its limits")
        if active:
            yield warning(
                "gpu.throttled",
                f"{_who(card)} is slowed down by {', '.join(active)}: all others wait for it in each step",
                "look at its cooling and power limit (`amd-smi metric --temperature --power`); leave the host out",
            )


def _partitions(statics: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    modes: dict[tuple[str, str], list[str]] = {}
    for card in statics:
        partition = _section(card, "partition")
        compute = str(partition.get("compute_partition") or partition.get("accelerator_partition") or "N/A")
        memory = str(partition.get("memory_partition") or partition.get("current_memory_partition") or "N/A")
        if (compute, memory) != ("N/A", "N/A"):
            modes.setdefault((compute, memory), []).append(str(card.get("gpu", "?")))
    if len(modes) > 1:
        words = "; ".join(
            f"{compute}/{memory}: {', '.join(cards)}" for (compute, memory), cards in modes.items()
        )
        yield error(
            "gpu.partition_modes",
            f"amd-smi shows cards that are partitioned differently ({words})",
            "`amd-smi set --compute-partition SPX --memory-partition NPS1` on all of them, while nothing runs",
        )
