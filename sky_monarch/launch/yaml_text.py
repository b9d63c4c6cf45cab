"""Writes plain values as YAML that readers of 1.1 (SkyPilot's) and of 1.2 (ours) read alike.

The two disagree on what an unquoted text means (``no``, ``010``, ``1:30``), so all that could mean anything else is
quoted, as JSON does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["yaml_text"]

# Letters, and then what has no meaning in YAML inside of a word. Numbers, dates and signs fail at the first letter.
_PLAIN = re.compile(r"[A-Za-z_/$~.][A-Za-z0-9_/.+@-]*(?::[A-Za-z0-9_/.+@-]+)*")
_WORDS = re.compile(
    r"(?i:y|n|yes|no|on|off|true|false|null|nan|inf|none)|~.*|\.+(?i:inf|nan)?|[.+_0-9]+|\.[0-9].*"
)
_BLOCK = re.compile(r"[!-~](?:[\t -~]*[!-~])?\n(?:(?:[\t -~]*[!-~])?\n)*")
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def yaml_text(value: Mapping[str, Any]) -> str:
    """The YAML of a mapping of texts, numbers, truth values, lists and mappings, with a final newline."""
    return "".join(f"{line}\n" for line in _mapping(value))


def _mapping(value: Mapping[str, Any]) -> Iterator[str]:
    for key, item in value.items():
        yield from _entry(f"{_scalar(key)}:", item)


def _entry(head: str, item: Any) -> Iterator[str]:
    if isinstance(item, Mapping) and item:
        yield head
        yield from _indented(_mapping(item))
    elif isinstance(item, list | tuple) and item:
        yield head
        for each in item:
            if isinstance(each, Mapping) and each:
                first, *rest = _mapping(each)
                yield f"- {first}"
                yield from _indented(iter(rest))
            else:
                yield f"- {_scalar(each)}"
    elif isinstance(item, str) and _BLOCK.fullmatch(item) and not item.endswith("\n\n"):
        yield f"{head} |"
        yield from _indented(iter(item[:-1].split("\n")))
    else:
        yield f"{head} {_scalar(item)}"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}" if line else ""


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and not _WORDS.fullmatch(value):
            return value
        return _ESCAPED.sub(lambda odd: f"\\u{ord(odd[0]):04x}", json.dumps(value, ensure_ascii=False))
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return "{}" if isinstance(value, Mapping) else "[]"
