"""How values of the SDK are read from JSON and written to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

__all__ = ["Record"]


class Record:
    """Reads and writes JSON. Unknown keys are ignored and missing ones take their default, as on the wire."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build from a JSON object."""
        known: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):
            if spec.name not in value:
                continue
            item = value[spec.name]
            inner: type[Record] | None = spec.metadata.get("of")
            if inner is not None and item is not None:
                item = (
                    tuple(inner.from_json(each) for each in item)
                    if isinstance(item, list)
                    else inner.from_json(item)
                )
            elif isinstance(item, list):
                item = tuple(item)
            elif item is None and spec.default is not dataclasses.MISSING:
                item = spec.default
            known[spec.name] = item
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The JSON object it was built from, with all fields."""
        return {spec.name: _plain(getattr(self, spec.name)) for spec in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
