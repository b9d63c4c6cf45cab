"""Takes secrets out of text that leaves this machine: the values that a run knows, and what looks like one."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

__all__ = ["Redactor"]

_Bytes = bytes  # inside of the class, that is a method
_SHORTEST = 4
_SHORTEST_INHERITED = 6
_SHORTEST_LINE = 8

#: Inherited variables that say nothing about anybody's accounts, and whose values are all over every path.
_HARMLESS = re.compile(
    r"HOME|PWD|OLDPWD|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TERM|TMPDIR|TZ|SHLVL|HOSTNAME|EDITOR|PAGER"
    r"|VIRTUAL_ENV\w*|CONDA_\w+|PYTHON\w*|XDG_\w+|PATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|COLORTERM"
)
_MARK = r"(?:token(?!s|iz)|secret|passw|credential|api[-_]?key|access[-_]?key|private[-_]?key|auth(?!or))"
# Every repetition is bounded, or eats all that it could begin with: a line may be megabytes long.
_NAMED = rf"{_MARK}[\w.-]{{0,64}}"
_VALUE = r"(?!\[)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"'\])}]+)"
_LOOKS_SECRET = re.compile(rf"(?i){_MARK}|_key$|_pat$|dsn|database_url")
_PATTERNS: tuple[tuple[re.Pattern[bytes], bytes], ...] = tuple(
    (re.compile(pattern.encode()), by)
    for pattern, by in (
        (
            r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            b"[private key]",
        ),
        (r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/@\"'<>]{1,1024}@", rb"\1[userinfo]@"),
        (r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}", rb"\1 [redacted]"),
        # --api-key=x, API_KEY=x, "password": "x"; --token x
        (rf"(?i)({_NAMED}[\"']?[ \t]{{0,8}}[=:][ \t]{{0,8}}){_VALUE}", rb"\1[redacted]"),
        (rf"(?i)((?<![\w-])--?[\w.-]{{0,64}}?{_NAMED}[ \t]{{1,8}})(?!-){_VALUE}", rb"\1[redacted]"),
        # What well-known services hand out.
        (r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|sk-|AKIA|ASIA|AIza)[\w-]{12,}", b"[redacted]"),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", b"[redacted]"),
    )
)


class Redactor:
    """Replaces every secret of one run.

    Args:
        private: What ``private.json`` holds; None where it is gone or damaged: then only what looks like a
            secret can be found.
        names: Variables of the job, by name.

    Attributes:
        knows_values: Whether the values of the run are known.
        replaced: How often something was replaced so far.
    """

    def __init__(self, private: Mapping[str, Any] | None, *, names: Iterable[str] = ()) -> None:
        self.knows_values = private is not None
        self.replaced = 0
        values: dict[str, str] = {}
        words: set[str] = set()
        for name, value, least in _values(private or {}):
            if len(value) >= least:
                values.setdefault(value, name)
            elif value and least == _SHORTEST and name == "secret":
                words.add(value)
        coded = {form: name for value, name in values.items() for form in _forms(value)}
        # The longer first: one may hold another.
        self._forms = sorted(coded.items(), key=lambda item: -len(item[0]))
        self._patterns = list(_PATTERNS)
        for found in (words, set(names)):
            if found:
                listed = "|".join(re.escape(one) for one in sorted(found, key=len, reverse=True))
                pattern = rf"(?<!\w)(?:{listed})(?!\w)"
                if found is not words:
                    pattern = rf"(?<![\w-])((?:{listed})[\"']?[ \t]{{0,8}}[=:][ \t]{{0,8}}){_VALUE}"
                by = b"[redacted]" if found is words else rb"\1[redacted]"
                self._patterns.append((re.compile(pattern.encode()), by))

    def bytes(self, data: bytes) -> bytes:
        """The data without secrets."""
        for form, name in self._forms:
            if form in data:
                self.replaced += data.count(form)
                data = data.replace(form, f"[{name}]".encode())
        for pattern, by in self._patterns:
            data, count = pattern.subn(by, data)
            self.replaced += count
        return data

    def text(self, text: str) -> str:
        """The text without secrets."""
        return self.bytes(text.encode(errors="surrogateescape")).decode(errors="replace")

    def value(self, value: Any) -> Any:
        """A JSON value without secrets in any of its texts. Where values are unknown, free text goes."""
        return self._walk(value, "")

    def json(self, data: _Bytes) -> _Bytes:
        """JSON without secrets in any of its texts, one value a line or one in all: its numbers stay numbers."""
        with contextlib.suppress(ValueError, RecursionError):
            return _dumped(self._texts_of(json.loads(data)), indent=1)
        lines = []
        for line in data.splitlines():
            try:
                lines.append(_dumped(self._texts_of(json.loads(line)), indent=None))
            except (ValueError, RecursionError):
                lines.append(self.bytes(line) + b"\n")
        return b"".join(lines)

    def _texts_of(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._texts_of(item) for name, item in value.items()}
        return [self._texts_of(item) for item in value] if isinstance(value, list) else value

    def _walk(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            if key not in _TELLING and _LOOKS_SECRET.search(key):
                self.replaced += 1
                return "[redacted]"
            return self.text(value) if self.knows_values or key in _TELLING else "[left out]"
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._walk(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, key) for item in value]
        return value


#: Texts that a run's own parts choose from a few, or that the job file says: no output of ranks is in them.
_TELLING = frozenset(
    (
        "accelerators",
        "address",
        "cause",
        "command",
        "created",
        "ended",
        "envs",
        "event",
        "fault",
        "head",
        "healing",
        "host",
        "hosts",
        "image",
        "infra",
        "kind",
        "lighthouse",
        "limit_of",
        "name",
        "names",
        "on_notice",
        "placement",
        "previous",
        "run_dir",
        "run_id",
        "secrets",
        "standby_start",
        "standby_until",
        "state",
        "sync",
        "timer",
        "to",
        "type",
        "version",
    )
)


#: What a shell had exported: whole environments, of which most says nothing.
_INHERITED = ("base_env", "shell_env")


def _values(private: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """``(what it is, value, fewest characters)`` of all that must not be seen."""
    for section, label, least in (
        ("secrets", "secret", _SHORTEST),
        ("envs", "env", _SHORTEST),
        ("base_env", "env", _SHORTEST_INHERITED),
        ("shell_env", "env", _SHORTEST_INHERITED),
    ):
        variables = private.get(section)
        for name, value in variables.items() if isinstance(variables, Mapping) else ():
            if isinstance(value, str) and not (section in _INHERITED and _HARMLESS.fullmatch(str(name))):
                yield label, value, least
    for name, value in private.items():
        if name not in ("secrets", "envs", *_INHERITED):
            yield from (("token", text, _SHORTEST) for text in _texts(value))
    # Who makes the bundle may have exported since what the run was not given.
    for name, value in os.environ.items():
        if _LOOKS_SECRET.search(name) and not _HARMLESS.fullmatch(name):
            yield "env", value, _SHORTEST_INHERITED


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in ("name", "cert_pem", "ca_pem"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _forms(value: str) -> Iterator[bytes]:
    """The value as it may be met: as it is, quoted in some way, or as base64 or hex, also inside of a longer text."""
    raw = value.encode(errors="surrogateescape")
    yield raw
    # What was read from a file has an end of line that whoever uses it strips.
    if len(raw.strip()) >= _SHORTEST and raw.strip() != raw:
        yield from _forms(value.strip())
    for line in raw.splitlines():
        if len(line.strip()) >= _SHORTEST_LINE:
            yield line.strip()
    plain = raw.decode(errors="replace")
    for quoted in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield quoted.encode()
        yield re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), quoted).encode()
    # Twice: a document in a document, or in the log of a process of ours.
    escaped = {form for once in _escaped(plain) for form in (once, *_escaped(once))}
    yield from (form.encode(errors="replace") for form in escaped)
    if len(raw) >= _SHORTEST:
        yield raw.hex().encode()
        yield raw.hex().upper().encode()
        # Three bytes make four characters: behind 0, 1 or 2 others, only whole characters of its own count.
        for before in range(3):
            head = -(-before * 4 // 3)
            coded = base64.b64encode(b"\0" * before + raw).rstrip(b"=")
            own = coded[head : (before + len(raw)) * 8 // 6]
            if len(own) >= _SHORTEST:
                yield own
                yield own.translate(bytes.maketrans(b"+/", b"-_"))


def _dumped(value: Any, *, indent: int | None) -> bytes:
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode(errors="replace")


def _escaped(text: str) -> tuple[str, ...]:
    """As a text stands in JSON, Python, Rust or a shell."""
    return (
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        repr(text)[1:-1],
        repr(text.encode(errors="replace"))[2:-1],
        text.replace("'", "'\\''"),
        text.replace("'", "'\"'\"'"),  # Python's shlex
    )
