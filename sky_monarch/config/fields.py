"""Types of the leaves of a job: each reads one value strictly and says in one sentence what it wants.

``bool`` is an ``int`` to Python and ``2.0`` one to pydantic's lax mode; a count takes neither.
"""

from __future__ import annotations

import difflib
import keyword
import math
import re
import shlex
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from sky_monarch.config.place import read_infra
from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.gpus import MOST_PER_HOST

__all__ = [
    "LONGEST_S",
    "Amount",
    "ArchiveSize",
    "Count",
    "Head",
    "HostGpus",
    "Image",
    "Infra",
    "JobName",
    "Limit",
    "ModuleNames",
    "Part",
    "Placement",
    "Positive",
    "Progress",
    "RequiredScript",
    "Restarts",
    "Script",
    "Seconds",
    "Segments",
    "Spares",
    "Spot",
    "Standby",
    "Steps",
    "Text",
    "shown",
    "slug",
]

LONGEST_S: Final = 366 * 24 * 3600
"""Longest duration in a job file, in seconds: a year."""

MAX_SCRIPT_BYTES: Final = 128 * 1024 - 1
"""Longest shell text: it is one argument of bash, and MAX_ARG_STRLEN of Linux includes a final NUL."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_MAX_NAME = 40
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Part(BaseModel):
    """Base of a job and its parts: frozen, no unknown field, and no value in the text of an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        validate_default=False,
    )


def shown(value: object) -> str:
    """A value for a message, cut short. Never use it for a value of ``envs`` or ``secrets``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:46]}..."


def slug(text: str) -> str:
    """The nearest usable job name; ``job`` where nothing is left."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text).strip("-")[:_MAX_NAME].strip("-") or "job"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise FieldRefusalError(f"must be text, not {shown(value)}")
    if "\0" in value:
        raise FieldRefusalError("holds a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldRefusalError("holds bytes that are no UTF-8") from None
    return value


def _job_name(value: object) -> str:
    name = _text(value)
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise FieldRefusalError(
            f"must be {_MAX_NAME} or fewer of a-z, 0-9 and -, with no - at either end, not {shown(name)}",
            suggestion=slug(name),
        )
    return name


def _script(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        raise FieldRefusalError(
            "must be text, not a list", fix=f"write it as one line: {shlex.join(value)[:200]}"
        )
    text = _text(value).replace("\r\n", "\n").replace("\r", "\n")
    if len(text.encode()) > MAX_SCRIPT_BYTES:
        raise FieldRefusalError(
            "is longer than the 128 KiB that Linux takes as one argument", fix="call a script of the workdir"
        )
    # Blanks at its end say nothing, and YAML's `|` adds a line end: two texts of equal intent are one job.
    bare = text.rstrip(" \t\n")
    return text if bare.endswith("\\") else bare


def _required_script(value: object) -> str:
    text = _script(value)
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.split("\n")):
        raise FieldRefusalError(
            "holds no command", fix="write what each rank runs, such as `run: python train.py`"
        )
    return text


def _whole(value: object, low: int, high: int) -> int:
    fix: str | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        if low <= value <= high:
            return value
        bound = f"at least {low}" if value < low else f"at most {high}"
        raise FieldRefusalError(
            f"must be {bound}, not {value if abs(value) < 10**12 else shown(float(value))}"
        )
    if isinstance(value, float) and value.is_integer() and low <= value <= high:
        fix = f"write {int(value)}"
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,9}", value.strip()):
        text = value.strip()
        fix = (
            f"write {int(text)}, without quotes"
            if str(int(text)) == text
            else "write it without leading zeros"
        )
    raise FieldRefusalError(f"must be a whole number, not {shown(value)}", fix=fix)


def _seconds(value: object, *, positive: bool = False, words: tuple[str, ...] = ()) -> float:
    wanted = "a number of seconds" + "".join(f", or {word}" for word in words)
    if isinstance(value, bool) or not isinstance(value, int | float):
        fix = suggestion = None
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]*)\s*", value)
            if match and (match[2] or "s") in _UNITS:
                fix = f"write {float(match[1]) * _UNITS[match[2] or 's']:g}"
            near = difflib.get_close_matches(value, words, 1)
            suggestion = near[0] if near else None
        raise FieldRefusalError(f"must be {wanted}, not {shown(value)}", fix=fix, suggestion=suggestion)
    if isinstance(value, int) and abs(value) > LONGEST_S:
        value = math.copysign(2.0 * LONGEST_S, value)
    seconds = float(value)
    if not math.isfinite(seconds) or seconds > LONGEST_S:
        off = "; write off for no limit" if "off" in words else ""
        raise FieldRefusalError(f"must be {LONGEST_S} seconds (a year) or less{off}")
    if seconds < 0 or (positive and seconds == 0):
        off = "; write off for no limit" if "off" in words else ""
        raise FieldRefusalError(f"must be {'more than 0' if positive else '0 or more'}, not {seconds:g}{off}")
    return seconds


def _limit(value: object, words: tuple[str, ...]) -> float | str:
    if isinstance(value, str) and value in words:
        return value
    # YAML 1.1 tools write `off` as a truth value; 1.2 does not.
    if value is False:
        raise FieldRefusalError("must be a number of seconds, or off, not false", suggestion="off")
    return _seconds(value, positive=True, words=words)


def _truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    known = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
    meant = known.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, str) and value.lower() in ("true", "false"):
        raise FieldRefusalError(
            f"must be true or false, not the text {shown(value)}", fix="write it without quotes"
        )
    raise FieldRefusalError(f"must be true or false, not {shown(value)}", suggestion=meant)


def _amount(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise FieldRefusalError(f"must be a number such as 16, or 16+ for at least 16, not {shown(value)}")
    match = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,3})?)\s*(\+?)\s*", text)
    if not match or float(match[1]) == 0:
        raise FieldRefusalError(f"must be a number such as 16, or 16+ for at least 16, not {shown(value)}")
    return f"{float(match[1]):.10g}{match[2]}"


def _module_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise FieldRefusalError(
            f"must be a list of module names, not {shown(value)}", fix=f"write [{value[:60]}]"
        )
    if not isinstance(value, list | tuple):
        raise FieldRefusalError(f"must be a list of module names, not {shown(value)}")
    for name in value:
        meant = None
        if isinstance(name, str) and (name.endswith(".py") or "/" in name):
            meant = name.removesuffix(".py").removeprefix("./").replace("/", ".")
        parts = name.split(".") if isinstance(name, str) else [""]
        if meant or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise FieldRefusalError(f"{shown(name)} is no importable module name", suggestion=meant)
    return tuple(dict.fromkeys(value))


def _infra(value: object) -> str:
    return read_infra(_text(value))


def _image(value: object) -> str:
    text = _text(value).strip()
    name = text.removeprefix("docker:")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}", name) or name.startswith(("http:", "https:")):
        raise FieldRefusalError(
            f"must be a container image such as docker:rocm/pytorch:latest, not {shown(text)}"
        )
    return f"docker:{name}"


def _word(value: object, words: tuple[str, ...], near: Mapping[str, str]) -> str:
    """One of a few words; ``near`` holds others by which people mean one of them."""
    if isinstance(value, str) and value in words:
        return value
    key = value.strip().lower().replace("_", "-").replace(" ", "-") if isinstance(value, str) else ""
    meant = key if key in words else near.get(key)
    close = difflib.get_close_matches(key, words, 1, 0.7)
    raise FieldRefusalError(
        f"must be {', '.join(words[:-1])} or {words[-1]}, not {shown(value)}",
        suggestion=meant or (close[0] if close else None),
    )


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


def _whole_within(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: _whole(value, low, high))


_NUMBER = {"type": "number", "maximum": LONGEST_S}

Text = Annotated[str, BeforeValidator(_text)]
JobName = Annotated[
    str, BeforeValidator(_job_name), _schema(type="string", pattern=f"^{_NAME.pattern}$", maxLength=_MAX_NAME)
]
Script = Annotated[str, BeforeValidator(_script)]
RequiredScript = Annotated[str, BeforeValidator(_required_script), _schema(type="string", minLength=1)]
Infra = Annotated[str, BeforeValidator(_infra)]
Image = Annotated[str, BeforeValidator(_image)]
Placement = Annotated[
    Literal["same-zone", "any"],
    BeforeValidator(
        lambda value: _word(value, ("same-zone", "any"), {"zone": "same-zone", "anywhere": "any"})
    ),
]
Head = Annotated[
    Literal["auto", "here", "cluster", "api-server"],
    BeforeValidator(
        lambda value: _word(
            value,
            ("auto", "here", "cluster", "api-server"),
            {"local": "here", "laptop": "here", "remote": "cluster", "server": "api-server"},
        )
    ),
]
HostGpus = Annotated[
    int, _whole_within(1, MOST_PER_HOST), _schema(type="integer", minimum=1, maximum=MOST_PER_HOST)
]
Amount = Annotated[str, BeforeValidator(_amount), _schema(type=["string", "number"])]
Spot = Annotated[bool, BeforeValidator(_truth)]
ModuleNames = Annotated[
    tuple[str, ...], BeforeValidator(_module_names), _schema(type="array", items={"type": "string"})
]
Count = Annotated[int, _whole_within(1, 65_535), _schema(type="integer", minimum=1, maximum=65_535)]
Restarts = Annotated[int, _whole_within(0, 1_000_000), _schema(type="integer", minimum=0, maximum=1_000_000)]
Steps = Annotated[int, _whole_within(1, 2**53), _schema(type="integer", minimum=1, maximum=2**53)]
ArchiveSize = Annotated[int, _whole_within(1, 2**20), _schema(type="integer", minimum=1, maximum=2**20)]
Segments = Annotated[int, _whole_within(1, 4096), _schema(type="integer", minimum=1, maximum=4096)]
Standby = Annotated[int, _whole_within(0, 1), _schema(type="integer", minimum=0, maximum=1)]
Spares = Annotated[int, _whole_within(0, 64), _schema(type="integer", minimum=0, maximum=64)]
Seconds = Annotated[float, BeforeValidator(_seconds), _schema(**_NUMBER, minimum=0)]
Positive = Annotated[
    float,
    BeforeValidator(lambda value: _seconds(value, positive=True)),
    _schema(**_NUMBER, exclusiveMinimum=0),
]
Limit = Annotated[
    float | str,
    BeforeValidator(lambda value: _limit(value, ("off",))),
    _schema(anyOf=[{**_NUMBER, "exclusiveMinimum": 0}, {"const": "off"}]),
]
Progress = Annotated[
    float | str,
    BeforeValidator(lambda value: _limit(value, ("auto", "off"))),
    _schema(anyOf=[{**_NUMBER, "exclusiveMinimum": 0}, {"enum": ["auto", "off"]}]),
]
