"""What hardware one replica group asks for, and the candidates that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from sky_monarch.config.fields import Amount, HostGpus, Image, Infra, Part, Spot, shown
from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.gpus import Accelerator, UnknownGpuError, parse_accelerator

__all__ = ["AcceleratorChoice", "Candidate", "ResourceOption", "Resources", "parse_accelerators"]

_MAX_CANDIDATES = 64
_NONE_HINT = "write `accelerators: null` (or leave the line out) for none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorChoice:
    """Accelerators of which any one will do.

    Attributes:
        options: At least one, each once.
        ordered: The first is wanted most. False where the order means nothing; ``options`` are then sorted.
    """

    options: tuple[Accelerator, ...]
    ordered: bool

    def canonical(self) -> str | list[str] | dict[str, int]:
        """The one spelling of this choice, which :func:`parse_accelerators` reads back."""
        if len(self.options) == 1:
            return str(self.options[0])
        if self.ordered or len({option.name for option in self.options}) < len(self.options):
            return [str(option) for option in self.options]
        return {option.name: option.count for option in self.options}


def parse_accelerators(value: object) -> AcceleratorChoice | None:
    """Read every form in which people ask for accelerators.

    Args:
        value: None; ``"MI300X:8"`` in any spelling; a list of such texts, the most wanted first; or a mapping
            of names to counts (a count of None, as in ``{MI300X, MI325X}``, means one), where any will do.

    Raises:
        FieldRefusalError: Anything else.
    """
    if value is None or isinstance(value, AcceleratorChoice):
        return value
    if isinstance(value, str) and value.strip():
        return AcceleratorChoice(options=(_one(value),), ordered=False)
    if isinstance(value, list | tuple) and value:
        options = [_one(item) for item in value]
        unique = tuple(dict.fromkeys(options))
        return AcceleratorChoice(options=unique, ordered=len(unique) > 1)
    if isinstance(value, dict) and value:
        options = [
            _one(name if count is None else f"{name}:{_counted(name, count)}")
            for name, count in value.items()
        ]
        return AcceleratorChoice(options=tuple(sorted(set(options))), ordered=False)
    if value in ("", [], {}, ()) or (isinstance(value, str) and not value.strip()):
        raise FieldRefusalError("is empty", fix=_NONE_HINT)
    raise FieldRefusalError(
        f"must be a model and a count such as MI300X:8, not {shown(value)}", fix=_NONE_HINT
    )


def _one(value: object) -> Accelerator:
    if not isinstance(value, str):
        raise FieldRefusalError(f"must be a model and a count such as MI300X:8, not {shown(value)}")
    try:
        return parse_accelerator(value)
    except UnknownGpuError as error:
        raise FieldRefusalError(str(error), suggestion=error.suggestion, fix=error.fix) from None


def _counted(name: object, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        fix = "a GPU is not shared by groups: ask for whole ones" if isinstance(count, float) else None
        raise FieldRefusalError(f"the count of {name} must be a whole number, not {shown(count)}", fix=fix)
    return count


def _options(value: object) -> object:
    if isinstance(value, list | tuple):
        if not value:
            raise FieldRefusalError("is empty", fix="list at least one option, or leave the line out")
        return tuple(value)
    raise FieldRefusalError(
        f"must be a list of options, not {shown(value)}", fix="begin each option with `- `"
    )


Accelerators = Annotated[
    Any,
    BeforeValidator(parse_accelerators),
    PlainSerializer(lambda choice: choice and choice.canonical()),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {
                    "type": "object",
                    "additionalProperties": {"type": ["integer", "null"], "minimum": 1},
                    "minProperties": 1,
                },
                {"type": "null"},
            ]
        }
    ),
]


class ResourceOption(Part):
    """One entry of ``any_of`` or ``ordered``; what it leaves out is taken from ``resources`` itself."""

    accelerators: Accelerators = None
    """GPUs of this option."""

    cpus: Amount | None = None
    """CPU cores of this option."""

    memory_gib: Amount | None = None
    """Memory of this option, in GiB."""

    use_spot: Spot | None = None
    """Whether this option may be taken back at any time."""

    infra: Infra | None = None
    """Where this option runs; by default where the job does."""

    image: Image | None = None
    """Container image of this option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One thing that a planner may look for: no choices are left in it."""

    accelerator: Accelerator | None
    cpus: str | None
    memory_gib: str | None
    use_spot: bool
    infra: str | None = None
    image: str | None = None


class Resources(Part):
    """What each replica group runs on."""

    accelerators: Accelerators = None
    """GPUs of one replica group: `MI300X:8`, a list (the first is wanted most), a mapping of names to counts
    (any will do), or `null` for none."""

    cpus: Amount | None = None
    """CPU cores: `16`, or `16+` for at least 16."""

    memory_gib: Amount | None = None
    """Memory in GiB: `128`, or `128+` for at least 128."""

    use_spot: Spot = False
    """Take capacity that can be taken back at any time, and costs less."""

    gpus_per_host: HostGpus | None = None
    """GPUs of one host, 8 at the most: as many replica groups share it as fit, and one that needs more spans
    several. `null`: what costs least where prices are known, else one group a host."""

    image: Image | None = None
    """Container image of the hosts, such as `docker:rocm/pytorch:latest`. `null`: one of AMD's with ROCm, where
    the place runs containers; elsewhere the host's own ROCm."""

    any_of: (
        Annotated[tuple[ResourceOption, ...], BeforeValidator(_options), Field(min_length=1, max_length=32)]
        | None
    ) = None
    """Alternatives of which any will do; each one overrides the fields above."""

    ordered: (
        Annotated[tuple[ResourceOption, ...], BeforeValidator(_options), Field(min_length=1, max_length=32)]
        | None
    ) = None
    """The same, the first wanted most. Not together with `any_of`."""

    @property
    def prefers_order(self) -> bool:
        """Whether the order of :meth:`candidates` is a preference."""
        choices = [self.accelerators, *(option.accelerators for option in self.any_of or self.ordered or ())]
        return self.ordered is not None or any(choice is not None and choice.ordered for choice in choices)

    def candidates(self) -> tuple[Candidate, ...]:
        """Every combination that satisfies the job, each once, most wanted first."""
        found: dict[Candidate, None] = {}
        for option in self.any_of or self.ordered or (ResourceOption(),):
            given = option.model_fields_set
            choice = option.accelerators if "accelerators" in given else self.accelerators
            spot = option.use_spot if option.use_spot is not None else self.use_spot
            image = option.image if "image" in given else self.image
            for accelerator, cpus, memory in product(
                choice.options if choice else (None,),
                (option.cpus if "cpus" in given else self.cpus,),
                (option.memory_gib if "memory_gib" in given else self.memory_gib,),
            ):
                candidate = Candidate(
                    accelerator=accelerator,
                    cpus=cpus,
                    memory_gib=memory,
                    use_spot=spot,
                    infra=option.infra,
                    image=image,
                )
                found.setdefault(candidate)
        return tuple(found)
