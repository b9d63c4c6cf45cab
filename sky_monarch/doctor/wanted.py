"""Whether a host has the accelerators that it should have: how many, and of which kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sky_monarch.doctor.devices import Device, amd_functions, devices
from sky_monarch.doctor.tree import Tree
from sky_monarch.gpus import GPUS

__all__ = ["Shortfall", "Wanted", "inventory", "needs", "shortfall", "usable"]

_NVIDIA = "proc/driver/nvidia/gpus"
_MASK = "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What there should be.

    Attributes:
        devices: How many, as HIP counts them.
        models: Of which any will do; empty: of any kind.
        exactly: More are wrong, too.
        why: Who wants them, as the message has it before them.
    """

    devices: int
    models: tuple[str, ...] = ()
    exactly: bool = False
    why: str = "expected:"

    def __str__(self) -> str:
        """Such as ``8 x MI300X or MI325X``."""
        return f"{self.devices} x {' or '.join(self.models) or 'any accelerator'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """What is wrong, and what helps."""

    message: str
    fix: str


def needs(groups: int) -> str:
    """Who wants devices where that is ``groups`` replica groups of a job: see :attr:`Wanted.why`."""
    return (
        f"the job's {groups} replica groups here need"
        if groups != 1
        else "the job's replica group here needs"
    )


def usable(found: Sequence[Device], env: Mapping[str, str]) -> list[Device]:
    """The devices that ``ROCR_VISIBLE_DEVICES`` leaves; of the other masks a rank gets one of its own."""
    mask = env.get(_MASK)
    if mask is None:
        return list(found)
    left: list[Device] = []
    for word in (part.strip() for part in mask.split(",")):
        uuid = word.lower().removeprefix("gpu-")
        named = [
            one for one in found if word == str(one.index) or (uuid != word.lower() and one.uuid == uuid)
        ]
        if not named:
            break  # as ROCr: whatever stands behind the first that is none does not count
        left += named
    return left


def inventory(found: Sequence[Device]) -> str:
    """For people: ``8 x MI300X``; empty where there are none."""
    names = Counter(device.model or device.arch for device in found)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def shortfall(tree: Tree, wanted: Wanted, env: Mapping[str, str] | None = None) -> Shortfall | None:
    """What a host lacks; None where it has what is wanted.

    Args:
        tree: Its files.
        wanted: What there should be.
        env: Whose ``ROCR_VISIBLE_DEVICES`` counts.
    """
    if not wanted.devices:
        return None
    found = devices(tree)
    left = usable(found, env or {})
    fitting = [one for one in left if _fits(one, wanted.models)]
    if len(fitting) == wanted.devices or (len(fitting) > wanted.devices and not wanted.exactly):
        others = len(left) - len(fitting)
        if not (wanted.exactly and others):
            return None
    here = inventory(found)
    there = f"{wanted.why} {wanted}"
    if not found:
        return _none(tree, there)
    if len(left) < len(found):
        return Shortfall(
            message=f"{_MASK} leaves {len(left)} of {here}; {there}",
            fix=f"name more devices in {_MASK}, or unset it; or ask for fewer",
        )
    if len(fitting) < len(left):
        return Shortfall(
            message=f"another kind of accelerator: {here}; {there}",
            fix="write what is here (resources.accelerators), or use hosts that have what is asked for",
        )
    if len(fitting) < wanted.devices:
        return Shortfall(
            message=f"too few accelerators: {here}; {there}",
            fix="ask for fewer (accelerators, or replicas that share a host); where one is missing that was here, it "
            "may have fallen off the bus: `dmesg | grep -i amdgpu`, then reset or replace the host",
        )
    return Shortfall(message=f"more accelerators: {here}; {there}", fix="correct the number")


def _fits(device: Device, models: Sequence[str]) -> bool:
    if not models:
        return True
    if device.model is not None:
        return device.model in models
    # A virtual function has an id of its own: of what is not in the table only this can be compared.
    return device.arch in {GPUS[model].arch for model in models if model in GPUS}


def _none(tree: Tree, there: str) -> Shortfall:
    if functions := amd_functions(tree):
        return Shortfall(
            message=f"no accelerator that can be used ({len(functions)} AMD device(s) on the PCI bus, none of them in "
            f"KFD); {there}",
            fix="load amdgpu (`modprobe amdgpu`, then `dmesg | grep amdgpu`); in a container pass --device=/dev/kfd "
            "--device=/dev/dri",
        )
    if nvidia := len(tree.names(_NVIDIA)):
        return Shortfall(
            message=f"no AMD accelerator ({nvidia} of NVIDIA's); {there}",
            fix="leave resources.accelerators out: ranks then see every device of this host and take their own by "
            "LOCAL_RANK; or run it where there are AMD's",
        )
    return Shortfall(
        message=f"no accelerators; {there}",
        fix="leave resources.accelerators out to train on the CPU, or run it where they are (`infra`); inside of a "
        "container pass --device=/dev/kfd --device=/dev/dri",
    )
