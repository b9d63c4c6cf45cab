"""Network interfaces that the environment names for gloo and RCCL, held against those that are there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from sky_monarch.errors import ConfigError

__all__ = ["check_interfaces"]

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(env: Mapping[str, str] = os.environ, present: Sequence[str] | None = None) -> None:
    """Refuse what gloo or RCCL would fail at, or hang over, much later and with fewer words.

    gloo takes the name of one interface. RCCL (and NCCL) take prefixes, separated by commas; all of them behind a
    ``^`` are left out, behind an ``=`` are whole names (NCCL's documentation of the variable).

    Args:
        env: The environment.
        present: Interfaces of this host; None for those that it has.

    Raises:
        ConfigError: An interface is named that is not there; the message lists those that are.
    """
    names = [name for _, name in socket.if_nameindex()] if present is None else list(present)
    gloo = env.get(_GLOO, "")
    if gloo and gloo not in names:
        syntax = " (it takes one name; ^ and lists are NCCL's)" if set(gloo) & set("^=,") else ""
        raise _refusal(_GLOO, gloo, f"no interface has that name{syntax}", names)
    nccl = env.get(_NCCL, "")
    if nccl and not _matches(nccl, names):
        raise _refusal(_NCCL, nccl, "no interface matches it", names)


def _matches(wanted: str, names: Sequence[str]) -> bool:
    excludes, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    whole, wanted = wanted.startswith("="), wanted.removeprefix("=")
    words = [word for word in wanted.split(",") if word]

    def named(name: str) -> bool:
        # NCCL's may have a port behind a colon.
        return any(
            name == word.split(":")[0] if whole else name.startswith(word.split(":")[0]) for word in words
        )

    return any(named(name) != excludes for name in names)


def _refusal(variable: str, value: str, why: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{variable} is {value!r}: {why}; this host has {', '.join(names) or 'none'}",
        hint=f"correct {variable}, or unset it: the session uses the interface of its own address",
    )
