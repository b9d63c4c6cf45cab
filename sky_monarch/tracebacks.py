"""Finds in what Python prints the line that a person wants to see: the exception, and their own file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Culprit", "culprit", "hung_at"]

_RANK = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'^[\s|+]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<name>.+?))?\s*$')
_HEADER = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure)\b")
_NAME = re.compile(r"^[A-Za-z_][\w.]*(?=:|$)")
_LIBRARY = re.compile(
    r"^<|/site-packages/|/dist-packages/|/lib/python\d"
    # Torch and torchft from a checkout, and what of ours is no recipe.
    r"|/torch/(?:_\w+|autograd|cuda|distributed|fx|nn|optim|utils)/|/torchft/\w+\.py$"
    r"|/sky_monarch/(?:training/(?!recipes/)|actors/|\w+\.py$)"
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_EXCEPTION_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What a traceback comes down to.

    Attributes:
        exception: Its line: ``ValueError: broken``; None where none was found.
        where: ``file:line`` of the innermost frame of the user's own code, of the innermost one where all are
            of libraries; None where none was found.
    """

    exception: str | None = None
    where: str | None = None


def culprit(lines: Iterable[str]) -> Culprit:
    """Find the last traceback in what a process has printed.

    Args:
        lines: Oldest first; the beginning may be cut off.

    >>> culprit(["Traceback (most recent call last):", '  File "a.py", line 7, in <module>', "Broken: x"])
    Culprit(exception='Broken: x', where='a.py:7')
    """
    exception = own = library = None
    inside = False
    for raw in lines:
        text = _RANK.sub("", raw.rstrip())
        if _HEADER in text:
            exception = own = library = None  # of chained exceptions the last one counts
            inside = True
        elif frame := _FRAME.match(text):
            inside = True
            where = f"{frame['file']}:{frame['line']}"
            if _LIBRARY.search(frame["file"]):
                library = where
            else:
                own = where
        elif inside and text and not text[0].isspace() and _NAME.match(text):
            exception, inside = text[:_EXCEPTION_CHARS], False
        elif not inside and _EXCEPTION.match(text) and own is None and library is None:
            exception = text[:_EXCEPTION_CHARS]  # its frames were cut off
    return Culprit(exception=exception, where=own or library)


def hung_at(stacks: Iterable[str]) -> str | None:
    """Where the main thread was, in a dump of :mod:`faulthandler`: ``train.py:12 in step``.

    Args:
        stacks: The dump by lines: threads, the main one last; of each the innermost frame first.

    Returns:
        The innermost frame of the user's own code, of the innermost one where all are of libraries.
    """
    own = library = None
    for raw in stacks:
        if _THREAD.match(raw):
            own = library = None
        elif frame := _FRAME.match(raw):
            name = f" in {frame['name']}" if frame["name"] else ""
            where = f"{frame['file']}:{frame['line']}{name}"
            if _LIBRARY.search(frame["file"]):
                library = library or where
            else:
                own = own or where
    return own or library
