"""AMD Instinct accelerators: what this version knows of them, and one spelling for each.

Memory, architecture and dies are those of AMD's table of GPU specifications (rocm.docs.amd.com, gpu-specs). A
name that is not in the table is refused: a typo would otherwise be found out by a provisioner, or by nobody.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass
from itertools import takewhile

__all__ = [
    "GPUS",
    "MAX_COUNT",
    "MOST_PER_HOST",
    "Accelerator",
    "Gpu",
    "UnknownGpuError",
    "canonical_gpu",
    "parse_accelerator",
]

MAX_COUNT = 1024
"""Most accelerators that one replica group may ask for."""

MOST_PER_HOST = 8
"""Most accelerators of one host: the widest Instinct platforms that are sold hold eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model.

    Attributes:
        name: Canonical spelling, such as ``MI300X``; SkyPilot's catalogs use the same.
        memory_gib: HBM of one card.
        arch: Compiler target, such as ``gfx942``.
        dies: Graphics dies of one card, each a device of its own to HIP. Kubernetes and Slurm count devices.
        rocm: Oldest ROCm release that was read to support it; None where no source was read.
        rocm_source: Where that was read.
    """

    name: str
    memory_gib: int
    arch: str
    dies: int = 1
    rocm: str | None = None
    rocm_source: str | None = None

    @property
    def gres(self) -> str:
        """Its type in Slurm's GRES, as sites spell it by convention: ``gpu:mi300x:8``. SkyPilot ignores case."""
        return self.name.lower()

    @property
    def node_label(self) -> str:
        """The Kubernetes label by which SkyPilot finds nodes that have it. None of SkyPilot's own tools puts it."""
        return f"skypilot.co/accelerator={self.name.lower()}"

    def label_command(self, node: str = "NODE") -> str:
        """The command that puts :attr:`node_label` on a node."""
        return f"kubectl label node {node} {self.node_label}"


@dataclass(frozen=True, slots=True, order=True)
class Accelerator:
    """So many of one model, as one replica group asks for them."""

    name: str
    count: int

    def __str__(self) -> str:
        """Canonical text, such as ``MI300X:8``."""
        return f"{self.name}:{self.count}"


class UnknownGpuError(ValueError):
    """No accelerator is meant by this text, or none that is known.

    Attributes:
        suggestion: The text that was probably meant.
        fix: What to do, where no text can be suggested.
    """

    def __init__(self, message: str, *, suggestion: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion
        self.fix = fix


_GFX942 = "ROCm 6.1.0 release notes: supported operating systems of MI300A and MI300X"
_GFX950 = "hipFFT 1.0.20 for ROCm 7.0.0 release notes: added gfx950 support"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="MI100", memory_gib=32, arch="gfx908"),
        Gpu(name="MI210", memory_gib=64, arch="gfx90a"),
        Gpu(name="MI250", memory_gib=128, arch="gfx90a", dies=2),
        Gpu(name="MI250X", memory_gib=128, arch="gfx90a", dies=2),
        Gpu(name="MI300A", memory_gib=128, arch="gfx942", rocm="6.1", rocm_source=_GFX942),
        Gpu(name="MI300X", memory_gib=192, arch="gfx942", rocm="6.1", rocm_source=_GFX942),
        Gpu(name="MI308X", memory_gib=192, arch="gfx942"),
        Gpu(name="MI325X", memory_gib=256, arch="gfx942"),
        Gpu(name="MI350X", memory_gib=288, arch="gfx950", rocm="7.0", rocm_source=_GFX950),
        Gpu(name="MI355X", memory_gib=288, arch="gfx950", rocm="7.0", rocm_source=_GFX950),
    )
}
"""Known models by canonical name."""

# Of another make. The list only chooses the words of a refusal; a name that is missing is refused all the same.
_NVIDIA = re.compile(r"(NVIDIA|TESLA|GEFORCE|QUADRO)|[ABHLVPT]\d{1,3}[A-Z]{0,2}\d*|G[BH]\d{3}|RTX\w*")

# Words that vendors and clouds put around the model's own name: "AMD Instinct MI300X OAM".
_DECORATION = re.compile(r"\b(AMD|INSTINCT|OAM|GPU|ACCELERATOR)\b")
_COUNTED = re.compile(r"(?P<name>[^:]*?)\s*(?::\s*(?P<count>.*?))?\s*")


def canonical_gpu(text: str) -> str:
    """The canonical name of a model, however it is spelt.

    Args:
        text: ``mi300x``, ``AMD Instinct MI300X OAM``, ``amd-instinct-mi300x``…

    Raises:
        UnknownGpuError: It is in no spelling a model of :data:`GPUS`.
    """
    unmarked = re.sub(r"[\s_\-®™]+", " ", text)
    words = unicodedata.normalize("NFKC", unmarked).upper()
    name = "".join(_DECORATION.sub(" ", words).split())
    if name in GPUS:
        return name
    # Among equally near ones, that which begins alike: MI30X is rather MI300X than MI350X.
    ranked = sorted(GPUS, key=lambda known: (-_nearness(name, known), -_alike(name, known)))
    near = [known for known in ranked if _nearness(name, known) >= 0.7]
    longer = [known for known in GPUS if name and known.startswith(name)]
    suggestion = next(iter([*longer, *near]), None)
    shown = text.strip()[:40]
    fix = None
    if suggestion is None and _NVIDIA.match(name):
        fix = "it is no AMD GPU: rank processes run on ROCm here; the nearest to ask for is MI300X"
    raise UnknownGpuError(
        f"{shown!r} is no AMD Instinct GPU of {', '.join(GPUS)}", suggestion=suggestion, fix=fix
    )


def _nearness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _alike(left: str, right: str) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def parse_accelerator(text: str) -> Accelerator:
    """Read ``NAME`` or ``NAME:COUNT``; without a count one is meant.

    Raises:
        UnknownGpuError: The model is unknown or the count is no whole number from 1 to :data:`MAX_COUNT`.
    """
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        raise UnknownGpuError(f"{text.strip()[:40]!r} is not of the form NAME:COUNT, such as MI300X:8")
    times = re.fullmatch(
        r"(\d{1,4})\s*x?\s+(\S.*)|(\d{1,4})x(\S.*)|(\S.*?)\s+x\s*(\d{1,4})", match["name"], re.IGNORECASE
    )
    if times and match["count"] is None:
        left, first, second, other, third, right = times.groups()
        try:
            meant = f"{canonical_gpu(first or other or third)}:{left or second or right}"
        except UnknownGpuError:
            meant = None
        raise UnknownGpuError(f"{text.strip()[:40]!r} is not of the form NAME:COUNT", suggestion=meant)
    try:
        name = canonical_gpu(match["name"])
    except UnknownGpuError as error:
        count = f":{match['count']}" if error.suggestion and match["count"] else ""
        suggestion = error.suggestion and error.suggestion + count
        raise UnknownGpuError(str(error), suggestion=suggestion, fix=error.fix) from None
    count_text = match["count"] if match["count"] is not None else "1"
    if not re.fullmatch(r"[1-9][0-9]{0,3}", count_text) or int(count_text) > MAX_COUNT:
        fraction = re.fullmatch(r"\d*\.\d+", count_text) is not None
        raise UnknownGpuError(
            f"the count of {name} must be a whole number from 1 to {MAX_COUNT}, not {count_text[:20]!r}",
            fix="a GPU is not shared by groups: ask for whole ones" if fraction else None,
        )
    return Accelerator(name, int(count_text))
