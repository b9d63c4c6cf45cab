"""Looking at one host: what is known of it, and every check in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sky_monarch.doctor import cards, clock, environment, kernel, libraries, limits, network, smi
from sky_monarch.doctor.devices import Device, amd_functions, devices
from sky_monarch.doctor.finding import Finding, Severity, error, info, ok
from sky_monarch.doctor.limits import Limits
from sky_monarch.doctor.tree import Tree
from sky_monarch.doctor.wanted import Wanted, inventory, shortfall

__all__ = ["Examination", "Situation", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A host, as it is to be examined. All of it can be that of another host than this.

    Attributes:
        root: Where its files lie.
        env: Its environment.
        limits: What its kernel allows a process; None where that is not known.
        report: What its libraries and devices say of themselves (``_core.gpu_report``); None where none was tried.
        tools: What its tools printed, by command line, such as ``dmesg``.
        torch_hip: ``torch.version.hip``; "" for a torch without HIP; None where there is no torch.
        wanted: Devices that there should be; None where nobody says.
        bare: No devices are used: what only matters to them is left out.
    """

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits | None = None
    report: Mapping[str, Any] | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    torch_hip: str | None = None
    wanted: Wanted | None = None
    bare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What came of it.

    Attributes:
        devices: The accelerators that the kernel knows.
        findings: Worst first.
        simulated: The devices are a software double's.
    """

    devices: tuple[Device, ...]
    findings: tuple[Finding, ...]
    simulated: bool = False

    @property
    def healthy(self) -> bool:
        """Whether nothing is an error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "healthy": self.healthy,
            "simulated": self.simulated,
            "accelerators": [
                {"index": one.index, "model": one.model, "arch": one.arch, "uuid": one.uuid, "pci": one.pci}
                for one in self.devices
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }


def examine(situation: Situation) -> Examination:
    """Run every check that applies to this host. A check that itself fails is a finding, and ends no other."""
    tree = Tree(situation.root)
    found = [] if situation.bare else devices(tree)
    simulated = bool((situation.report or {}).get("simulated"))
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: limits.check(situation.limits, accelerated=bool(found)),
        lambda: clock.check(tree, situation.tools),
    ]
    if not situation.bare:
        checks += [
            lambda: presence(tree, found, situation),
            lambda: libraries.check(found, situation.report, situation.env, situation.torch_hip),
        ]
    if found:
        checks += [
            lambda: cards.check(tree, found, situation.tools),
            lambda: smi.check(found, situation.tools),
            lambda: kernel.check(tree),
            lambda: network.check(tree, found, situation.limits),
            lambda: environment.check(tree, found, situation.env),
        ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except (ArithmeticError, LookupError, TypeError, ValueError) as broken:
            findings.append(
                error(
                    "doctor",
                    f"a check failed on what it read: {type(broken).__name__}: {broken}",
                    "report it, with the output of `sky-monarch doctor --json`",
                )
            )
    findings.sort(key=lambda finding: finding.severity.rank)
    return Examination(devices=tuple(found), findings=tuple(findings), simulated=simulated)


def presence(tree: Tree, found: list[Device], situation: Situation) -> Iterator[Finding]:
    """Whether there are the accelerators that there should be."""
    functions, wanted = amd_functions(tree), situation.wanted
    # Who asks for a number by hand means the host, whatever the mask of this shell.
    masks = {} if wanted is None or wanted.exactly else situation.env
    lacking = None if wanted is None else shortfall(tree, wanted, masks)
    if not found and functions:
        yield error(
            "gpu.driver",
            f"{len(functions)} AMD device(s) on the PCI bus ({', '.join(functions[:8])}) and no accelerator in KFD",
            "load amdgpu (`modprobe amdgpu`, then `dmesg | grep amdgpu`); in a container pass "
            "--device=/dev/kfd --device=/dev/dri",
        )
    elif lacking is not None:
        yield error("gpu.count", lacking.message, lacking.fix)
    elif not found and situation.report and situation.report.get("devices"):
        count = len(situation.report["devices"])
        yield info("gpu.count", f"{count} accelerator(s) of platform {situation.report.get('platform')}")
    elif not found:
        yield info("gpu.count", "no accelerators")
    else:
        yield ok("gpu.count", inventory(found))
