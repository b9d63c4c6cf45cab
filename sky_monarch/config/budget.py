"""What a run may cost, in money and in time."""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

from pydantic import BeforeValidator, WithJsonSchema

from sky_monarch.config.fields import Part, shown
from sky_monarch.config.problem import FieldRefusalError

__all__ = ["Budget"]

_OFF = "off"
_MOST_USD: Final = 1e9
_MOST_HOURS: Final = 366 * 24.0
_AMOUNT = re.compile(r"\s*\$?\s*(\d{1,9}(?:\.\d{1,6})?)\s*(\$|usd|h|hours?|d|days?)?\s*", re.IGNORECASE)
_UNITS = dict.fromkeys(("d", "day", "days"), 24)


def _ceiling(value: object, what: str, most: float) -> float | str:
    if value == _OFF and isinstance(value, str):
        return value
    # YAML 1.1 tools write `off` as a truth value; 1.2 does not.
    if value is False:
        raise FieldRefusalError(f"must be {what}, or off, not false", suggestion=_OFF)
    if isinstance(value, bool) or not isinstance(value, int | float):
        match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
        fix = f"write {float(match[1]) * _UNITS.get((match[2] or '').lower(), 1):g}" if match else None
        raise FieldRefusalError(f"must be {what}, or off, not {shown(value)}", fix=fix)
    amount = float(value) if abs(value) <= most else math.inf
    if not 0 < amount < math.inf:
        bound = "more than 0" if value <= 0 else f"{most:g} or less"
        raise FieldRefusalError(f"must be {bound}; write off for no limit")
    return amount


def _schema(most: float) -> WithJsonSchema:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": most}
    return WithJsonSchema({"anyOf": [number, {"const": _OFF}]})


Dollars = Annotated[
    float | str,
    BeforeValidator(lambda value: _ceiling(value, "a number of US dollars", _MOST_USD)),
    _schema(_MOST_USD),
]
Hours = Annotated[
    float | str,
    BeforeValidator(lambda value: _ceiling(value, "a number of hours", _MOST_HOURS)),
    _schema(_MOST_HOURS),
]


class Budget(Part):
    """What a run may cost. Where it is spent the run ends in order, as FAILED, with exit code 9."""

    max_usd: Dollars = "off"
    """US dollars for all hosts together, as far as their prices are known, or `off`. A little more is spent while
    ranks end and hosts are taken down."""

    max_hours: Hours = "off"
    """Hours from the launch on, with those in which hosts are waited for, or `off`."""
