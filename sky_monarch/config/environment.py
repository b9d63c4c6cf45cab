"""Environment variables of a job: which names and values a rank's environment can take.

The rules are the operating system's (a process environment holds no NUL, and Linux caps one entry), the
agent's (it sets some names itself) and the wire's (texts are UTF-8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sky_monarch.config.problem import FieldRefusalError

__all__ = [
    "MAX_ENTRY_BYTES",
    "MAX_TOTAL_BYTES",
    "RESERVED",
    "check_name",
    "check_total",
    "check_value",
    "parse_override",
    "parse_overrides",
]

MAX_ENTRY_BYTES = 128 * 1024
"""Longest ``NAME=value`` with its final NUL: MAX_ARG_STRLEN of Linux, 32 pages of 4 KiB."""

MAX_TOTAL_BYTES = 1024 * 1024
"""Most that all variables of a job may hold. Linux gives arguments and environment a quarter of the stack
limit together, 2 MiB by default, and the caller's own environment needs its share."""

RESERVED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_MAX_RESTARTS",
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_USE_AGENT_STORE",
        ),
        "the agent sets it for each rank, as torchrun does",
    ),
    **dict.fromkeys(
        ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE"),
        "the agent sets it for each replica group, for TorchFT",
    ),
}
"""Names that a job may not set, with the reason. So is every name that begins with ``SKY_MONARCH_``."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(name: str) -> None:
    """Refuse a name that no shell can read or that a rank's agent sets itself.

    Raises:
        FieldRefusalError: With the reason.
    """
    if not _NAME.fullmatch(name):
        slug = re.sub(r"[^A-Za-z0-9_]", "_", name.strip())[:60]
        slug = f"_{slug}" if slug[:1].isdigit() else slug
        meant = slug if _NAME.fullmatch(slug) and slug.strip("_") else None
        raise FieldRefusalError(
            "is no name of an environment variable: letters, digits and _ only, no digit first",
            suggestion=meant,
        )
    reason = (
        "names that begin with SKY_MONARCH_ are ours"
        if name.startswith("SKY_MONARCH_")
        else RESERVED.get(name)
    )
    if reason:
        raise FieldRefusalError(f"is reserved: {reason}", fix="remove it, or use another name")


def check_value(name: str, value: str) -> None:
    """Refuse a value that a process environment cannot hold. The value itself is never part of the message.

    Raises:
        FieldRefusalError: With the reason.
    """
    if "\0" in value:
        raise FieldRefusalError(
            "holds a NUL character, which no environment variable can", fix="encode it, as base64 say"
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise FieldRefusalError("holds bytes that are no UTF-8", fix="encode it, as base64 say") from None
    if len(name) + size + 2 > MAX_ENTRY_BYTES:
        raise FieldRefusalError(
            f"is {size} bytes long; Linux takes {MAX_ENTRY_BYTES // 1024} KiB at most",
            fix="pass the path of a file",
        )


def check_total(*variables: Mapping[str, str]) -> None:
    """Refuse variables that are too large together.

    Raises:
        FieldRefusalError: With the sum.
    """
    total = sum(len(name) + len(value.encode()) + 2 for table in variables for name, value in table.items())
    if total > MAX_TOTAL_BYTES:
        raise FieldRefusalError(
            f"envs and secrets hold {total} bytes together; {MAX_TOTAL_BYTES // 1024} KiB is the limit",
            fix="pass the paths of files",
        )


def parse_override(text: str) -> tuple[str, str | None]:
    """Split the argument of ``--env`` or ``--secret``.

    Returns:
        Name and value for ``KEY=VALUE`` (VALUE may hold more ``=``); name and None for ``KEY`` alone, whose
        value is taken from the caller's environment.
    """
    name, equals, value = text.partition("=")
    return name, value if equals else None


def parse_overrides(texts: Iterable[str]) -> dict[str, str | None]:
    """All arguments of ``--env`` or ``--secret``; of a name given twice the last one counts."""
    return dict(map(parse_override, texts))
