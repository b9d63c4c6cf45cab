"""The rules of ``.gitignore`` files, as git reads them, for where git itself is not asked.

After gitignore(5) and git's ``wildmatch.c``. A character is a byte, as it is there: ``?`` is half an umlaut.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Rule", "read_rules"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"!-~",
    "lower": "a-z",
    "print": r" -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line.

    Attributes:
        matches: Of a name, or of the path below the file's folder.
        ignores: What it matches is ignored; else it is not, whatever earlier lines say.
        folders_only: It is about folders alone.
        by_name: It is about the last part of a path, wherever that is.
    """

    matches: re.Pattern[str]
    ignores: bool
    folders_only: bool
    by_name: bool

    def is_about(self, path: str, *, is_folder: bool) -> bool:
        """Whether it says something of an entry of the file's folder, or below that.

        Args:
            path: Relative to it.
            is_folder: Whether that is one, and no link.
        """
        if self.folders_only and not is_folder:
            return False
        asked = path.rpartition("/")[2] if self.by_name else path
        return self.matches.fullmatch(os.fsencode(asked).decode("latin-1")) is not None


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file, in order: the last one that is about something decides."""
    text = path.read_bytes().removeprefix(_BYTE_ORDER_MARK).decode("latin-1")
    return tuple(rule for line in text.split("\n") if (rule := _rule(_trimmed(line))) is not None)


def _trimmed(line: str) -> str:
    """Blanks at the end of a line are no part of it, unless they are escaped."""
    line = line.removesuffix("\r")
    trimmed = line.rstrip(" ")
    escaped = len(trimmed) < len(line) and (len(trimmed) - len(trimmed.rstrip("\\"))) % 2
    return f"{trimmed} " if escaped else trimmed


def _rule(line: str) -> Rule | None:
    """The rule of a line; None where it is a remark, or git can make nothing of it."""
    if not line or line.startswith("#"):
        return None
    pattern = line.removeprefix("!")
    inner = pattern.removesuffix("/")
    by_name = "/" not in inner
    try:
        matches = "".join(_translated(inner.removeprefix("/")))
        return Rule(
            matches=re.compile(matches, re.DOTALL),
            ignores=pattern == line,
            folders_only=inner != pattern,
            by_name=by_name,
        )
    except (ValueError, re.error):
        return None


def _translated(glob: str) -> Iterator[str]:
    """Pieces of the regular expression that matches a whole path.

    Raises:
        ValueError: Nothing can match.
    """
    if not glob:
        raise ValueError("it is empty")
    at = 0
    while at < len(glob):
        char = glob[at]
        at += 1
        if char == "\\":
            if at == len(glob):
                raise ValueError("nothing follows the backslash")
            yield re.escape(glob[at])
            at += 1
        elif char == "?":
            yield "[^/]"
        elif char == "[":
            text, at = _bracket(glob, at)
            yield text
        elif char == "*":
            first = at - 1
            while glob[at : at + 1] == "*":
                at += 1
            whole = at - first > 1 and (first == 0 or glob[first - 1] == "/")
            if whole and glob[at : at + 1] == "/":
                at += 1
                yield "(?:.*/)?"
            elif whole and at == len(glob):
                yield ".*"
            else:
                yield "[^/]*"
        else:
            yield re.escape(char)


def _bracket(glob: str, at: int) -> tuple[str, int]:
    """A set of characters, from behind its first bracket, and where it ends."""
    negated = glob[at : at + 1] in ("!", "^")
    at += negated
    parts: list[str] = []
    first = at
    while at < len(glob) and (glob[at] != "]" or at == first):
        if glob.startswith("[:", at) and (end := glob.find(":]", at + 2)) != -1:
            if (name := glob[at + 2 : end]) not in _CLASSES:
                raise ValueError(f"there is no class {name}")
            parts.append(_CLASSES[name])
            at = end + 2
            continue
        low, at = _member(glob, at)
        parts.append(re.escape(low))
        if glob[at : at + 1] == "-" and glob[at + 1 : at + 2] not in ("", "]"):
            high, at = _member(glob, at + 1)
            if low <= high:  # else git takes the first of them alone
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
    if at >= len(glob):
        raise ValueError("the bracket is not closed")
    inner = "".join(parts)
    if negated:
        return f"[^/{inner}]", at + 1
    return (f"(?!/)[{inner}]" if inner else "(?!)"), at + 1


def _member(glob: str, at: int) -> tuple[str, int]:
    if glob[at] == "\\":
        at += 1
    if at >= len(glob):
        raise ValueError("the bracket is not closed")
    return glob[at], at + 1
