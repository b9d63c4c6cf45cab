"""A YAML 1.2 reader that keeps positions and the literal text of each scalar.

ruamel.yaml scans and parses; this file only builds a tree from its events, because what ruamel's constructors
return has lost what a job file needs: the text as typed (``010``, ``yes``, ``1.10``), the line of every key,
and all duplicate keys at once. The limits below bound the time and memory that any file can cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from sky_monarch.config.problem import Position, Problem

__all__ = [
    "MAX_FILE_BYTES",
    "DocumentError",
    "Items",
    "Node",
    "Scalar",
    "Table",
    "core_value",
    "is_null",
    "locate",
    "path_text",
    "read_document",
]

MAX_FILE_BYTES = 256 * 1024
"""Largest job file. The scripts of a job belong into its working folder."""

MAX_DEPTH = 20
"""Deepest nesting; a job needs four levels."""

MAX_EXPANDED = 2 * 1024 * 1024
"""Most that aliases may expand a file to, in characters plus :data:`NODE_COST` a node."""

LONGEST_SHOWN = 100
"""Longest part of a file's text that a message repeats."""

NODE_COST = 32
"""What a node counts for besides its text."""

# YAML 1.2, c-printable, without the three line separators: 1.2 reads those as text where 1.1 (and here and
# there ruamel) breaks the line, so a value holding one would arrive changed.
_UNPRINTABLE = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

_SURROGATES = re.compile(r"[\ud800-\udbff][\udc00-\udfff]")

_CORE_TAGS = "tag:yaml.org,2002:"
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value.

    Attributes:
        text: The literal text, after YAML's folding and escapes.
        plain: It was not quoted and is no block: YAML gives such text a type.
        position: Where it starts.
    """

    text: str
    plain: bool
    position: Position

    @property
    def cost(self) -> int:
        """Share of :data:`MAX_EXPANDED`."""
        return NODE_COST + len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A mapping whose keys are texts; ``entries`` are in file order, merge keys are resolved."""

    entries: dict[str, tuple[Scalar, Node]]
    position: Position
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A sequence."""

    nodes: tuple[Node, ...]
    position: Position
    cost: int


Node = Scalar | Table | Items
Path = tuple[str | int, ...]


class DocumentError(Exception):
    """The text is no usable YAML document; nothing further can be checked."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_document(text: str) -> tuple[Node, list[Problem]]:
    r"""Read the one document of a job file.

    Args:
        text: Decoded text with ``\n`` line ends and without a byte order mark.

    Returns:
        The root node, and the problems that do not stop the reading (duplicate keys).

    Raises:
        DocumentError: No YAML 1.2, more or less than one document, or past one of the limits of this file.
    """
    if len(text) > MAX_FILE_BYTES:
        raise _refused(
            f"is larger than {MAX_FILE_BYTES // 1024} KiB",
            fix="keep scripts and data in files of the workdir",
        )
    odd = _UNPRINTABLE.search(text)
    if odd:
        line = text.count("\n", 0, odd.start()) + 1
        column = odd.start() - (text.rfind("\n", 0, odd.start()) + 1) + 1
        raise _refused(
            f"holds the character U+{ord(odd.group()):04X}, which YAML text cannot hold",
            Position(line, column),
            fix='write it as an escape in double quotes, such as "\\u2028"',
        )
    return _Composer(text).document()


class _Composer:
    """Builds the tree of one document from parser events."""

    def __init__(self, text: str) -> None:
        self._events = _safe_events(text)
        self._anchors: dict[str, Node] = {}
        self._problems: list[Problem] = []

    def document(self) -> tuple[Node, list[Problem]]:
        event = next(self._events)  # the stream's start
        event = next(self._events)
        empty = _refused("is empty", Position(1, 1), fix="`sky-monarch init` writes one to start from")
        if isinstance(event, StreamEndEvent):
            raise empty
        if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
            raise _refused(
                "asks for another YAML version",
                _position(event),
                fix="remove the %YAML line: job files are YAML 1.2",
            )
        event = next(self._events)
        if isinstance(event, ScalarEvent) and not event.value and not event.style and event.anchor is None:
            raise empty
        root = self._node(event, (), 0)
        next(self._events)  # the document's end
        event = next(self._events)
        if not isinstance(event, StreamEndEvent):
            raise _refused("holds more than one document", _position(event), fix="keep one job a file")
        return root, self._problems

    def _node(self, event: Any, path: Path, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise _refused(f"is nested deeper than {MAX_DEPTH} levels", _position(event))
        if isinstance(event, AliasEvent):
            try:
                return self._anchors[event.anchor]
            except KeyError:
                raise _refused(
                    f"*{event.anchor[:LONGEST_SHOWN]} has no anchor that is complete before it",
                    _position(event),
                    fix=f"put &{event.anchor[:LONGEST_SHOWN]} in front of an earlier value",
                ) from None
        _check_tag(event)
        node: Node
        if isinstance(event, ScalarEvent):
            # `!!str 010` and `! 010` are texts by request, as if quoted.
            plain = event.style is None and event.tag in (None, *(_CORE_TAGS + tag for tag in _TYPED))
            node = Scalar(text=_joined(event.value), plain=plain, position=_position(event))
        elif isinstance(event, SequenceStartEvent):
            node = self._items(event, path, depth)
        else:
            node = self._table(event, path, depth)
        if node.cost > MAX_EXPANDED:
            raise _refused("holds too much once its aliases are expanded", node.position)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _items(self, start: Event, path: Path, depth: int) -> Items:
        nodes: list[Node] = []
        cost = NODE_COST
        while not isinstance(event := next(self._events), SequenceEndEvent):
            node = self._node(event, (*path, len(nodes)), depth + 1)
            cost += node.cost
            if cost > MAX_EXPANDED:
                raise _refused("holds too much once its aliases are expanded", node.position)
            nodes.append(node)
        return Items(nodes=tuple(nodes), position=_position(start), cost=cost)

    def _table(self, start: Event, path: Path, depth: int) -> Table:
        entries: dict[str, tuple[Scalar, Node]] = {}
        merged: dict[str, tuple[Scalar, Node]] = {}
        cost = NODE_COST
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._node(event, path, depth + 1)
            if not isinstance(key, Scalar):
                raise _refused(
                    "a key must be text", key.position, path=path, fix="quote it if it begins with [ or {"
                )
            value = self._node(next(self._events), (*path, key.text), depth + 1)
            if key.plain and key.text == "<<":
                for name, entry in self._merge(value, path).items():
                    merged.setdefault(name, entry)
            elif key.text in entries:
                first = entries[key.text][0].position
                self._problems.append(
                    Problem(
                        path=path_text((*path, key.text)),
                        message=f"is given twice, on lines {first.line} and {key.position.line}",
                        line=key.position.line,
                        column=key.position.column,
                        fix="remove one of the two",
                    )
                )
            else:
                entries[key.text] = (key, value)
            cost += key.cost + value.cost
            if cost > MAX_EXPANDED:
                raise _refused("holds too much once its aliases are expanded", value.position)
        for name, entry in merged.items():
            entries.setdefault(name, entry)
        return Table(entries=entries, position=_position(start), cost=cost)

    def _merge(self, value: Node, path: Path) -> dict[str, tuple[Scalar, Node]]:
        """Entries of ``<<: *base`` or ``<<: [*first, *second]``; the first one to name a key wins."""
        found: dict[str, tuple[Scalar, Node]] = {}
        for table in value.nodes if isinstance(value, Items) else (value,):
            if not isinstance(table, Table):
                raise _refused(
                    "<< merges mappings only",
                    value.position,
                    path=path,
                    fix="name the anchor of a mapping: <<: *base",
                )
            for name, entry in table.entries.items():
                found.setdefault(name, entry)
        return found


_TYPED = ("int", "float", "bool", "null", "timestamp")


def _safe_events(text: str) -> Iterator[Event]:
    """Events of the parser, with each of its errors turned into a :class:`DocumentError`."""
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        raise _syntax_error(error, text) from error
    except Exception as error:
        # The scanner lets ValueError, OverflowError and others through on bad escapes and directives;
        # whatever a file does to it is that file's fault and no traceback of ours.
        raise _refused(f"is no YAML that can be read ({error})") from error


def _syntax_error(error: Any, text: str) -> DocumentError:
    mark = error.problem_mark or error.context_mark
    position = Position(mark.line + 1, mark.column + 1) if mark else None
    what = str(error.problem or error.context or "cannot be read").split("\n")[0]
    lines = text.split("\n")
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    fix: str | None = None
    if "\t" in line[: len(line) - len(line.lstrip())]:
        what, fix = "the line is indented with a tab", "indent with spaces"
    elif "mapping values are not allowed" in what:
        fix = "put a text that holds ': ' into quotes, and check the indentation"
    elif re.search(r":\s+[*&!%@`|>]", line) and "block" not in what:
        fix = "put a text that begins with one of * & ! % @ ` into quotes"
    return _refused(f"no valid YAML: {what}", position, fix=fix)


def _joined(text: str) -> str:
    r"""Text with surrogate pairs joined: JSON, which is YAML too, escapes an emoji as ``\ud83c\udf89``."""
    return _SURROGATES.sub(lambda pair: pair.group().encode("utf-16", "surrogatepass").decode("utf-16"), text)


def _check_tag(event: Any) -> None:
    tag = event.tag
    if tag is None or tag == "!" or tag.removeprefix(_CORE_TAGS) in (*_TYPED, "str", "map", "seq"):
        return
    shown = tag[:LONGEST_SHOWN]
    raise _refused(f"the tag {shown} means nothing in a job file", _position(event), fix="remove the tag")


def _position(event: Event) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


def _refused(
    message: str, position: Position | None = None, *, path: Path = (), fix: str | None = None
) -> DocumentError:
    line, column = (position.line, position.column) if position else (None, None)
    return DocumentError(Problem(path=path_text(path), message=message, line=line, column=column, fix=fix))


def is_null(node: Node) -> bool:
    """Whether YAML reads the node as null: nothing at all, ``~`` or ``null``, unquoted."""
    return isinstance(node, Scalar) and node.plain and node.text in _NULL


def core_value(scalar: Scalar) -> bool | int | float | str | None:
    """The value of a scalar by the core schema of YAML 1.2.

    Numbers with a leading zero stay texts: 1.1 reads ``010`` as eight and 1.2 as ten, so no reader is sure.
    """
    text = scalar.text
    if not scalar.plain or len(text) > _LONGEST_NUMBER or _LEADING_ZERO.fullmatch(text):
        return text
    if text in _NULL:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def locate(root: Node, path: Path, *, key: bool = False) -> Position | None:
    """Where a field is, or the nearest thing around it.

    Args:
        root: Root of the document.
        path: Keys and indices.
        key: Give the position of the last key instead of that of its value.
    """
    node, position = root, root.position
    for step in path:
        if isinstance(node, Table) and isinstance(step, str) and step in node.entries:
            name, node = node.entries[step]
            # An empty value has no place of its own worth pointing at.
            position = (
                name.position if key or is_null(node) or not isinstance(node, Scalar) else node.position
            )
        elif isinstance(node, Items) and isinstance(step, int) and step < len(node.nodes):
            node = node.nodes[step]
            position = node.position
        else:
            break
    return position


def path_text(path: Path) -> str:
    """A path for people: ``resources.any_of[1].use_spot``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if len(step) <= LONGEST_SHOWN else f"{step[:LONGEST_SHOWN]}..."
            text += f".{name}" if text else name
    return text
