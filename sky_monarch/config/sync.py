"""How often replica groups agree on their parameters: ``every_step``, or ``diloco(n)``.

Read by the job file and by the session alike, so nothing here needs pydantic or torch.
"""

from __future__ import annotations

import difflib
import re

from sky_monarch.config.problem import FieldRefusalError

__all__ = ["EVERY_STEP", "MOST_LOCAL_STEPS", "local_steps", "read_sync"]

EVERY_STEP = "every_step"

MOST_LOCAL_STEPS = 10_000
"""Most steps between two outer ones. The DiLoCo paper goes to 2,000; all of them are lost with a group."""

_DILOCO = re.compile(r"diloco\((0|[1-9][0-9]{0,8})\)")
_LOOSE = re.compile(r"\W*([A-Za-z]+(?:[-_ ][A-Za-z]+)*)\W*([0-9]{1,9})?\W*")
_USUAL = 20
_NEAR = {
    **dict.fromkeys(("diloco", "local", "local_sgd", "outer", "semi_sync"), "diloco"),
    **dict.fromkeys(
        ("every_step", "each_step", "step", "sync", "synchronous", "always", "allreduce", "ddp", "off"),
        EVERY_STEP,
    ),
}


def read_sync(value: object) -> str:
    """The value, where it is ``every_step`` or ``diloco(n)``.

    Raises:
        FieldRefusalError: It is neither; with what was probably meant.
    """
    wanted = f"must be {EVERY_STEP} or diloco(n), such as diloco({_USUAL})"
    if not isinstance(value, str):
        shown = {dict: "a mapping", list: "a list", bool: str(value).lower()}.get(
            type(value), repr(value)[:50]
        )
        only = list(value.items()) if isinstance(value, dict) else []
        meant = _diloco(only[0][1]) if len(only) == 1 and only[0][0] == "diloco" else None
        raise FieldRefusalError(f"{wanted}, not {shown}", suggestion=meant)
    if value == EVERY_STEP:
        return value
    if match := _DILOCO.fullmatch(value):
        if 1 <= int(match[1]) <= MOST_LOCAL_STEPS:
            return value
        raise FieldRefusalError(f"diloco takes 1 to {MOST_LOCAL_STEPS} steps, not {match[1]}")
    raise FieldRefusalError(
        f"{wanted}, not {value!r}" if len(value) <= 50 else wanted, suggestion=_meant(value)
    )


def local_steps(sync: str) -> int:
    """Steps that a group takes alone between two outer ones; 0 for ``every_step``.

    Args:
        sync: What :func:`read_sync` took.
    """
    match = _DILOCO.fullmatch(sync)
    return int(match[1]) if match else 0


def _meant(text: str) -> str | None:
    match = _LOOSE.fullmatch(text)
    if match is None:
        return None
    word = re.sub(r"[- ]", "_", match[1].lower())
    near = difflib.get_close_matches(word, _NEAR, 1, 0.7)
    if not near:
        return None
    return _diloco(match[2]) if _NEAR[near[0]] == "diloco" else EVERY_STEP


def _diloco(steps: object) -> str:
    known = (
        isinstance(steps, int | str)
        and not isinstance(steps, bool)
        and re.fullmatch(r"[0-9]{1,9}", str(steps))
    )
    number = int(str(steps)) if known else 0
    return f"diloco({number if 1 <= number <= MOST_LOCAL_STEPS else _USUAL})"
