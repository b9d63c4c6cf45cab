"""The process that serves a host of actor meshes: ``sky-monarch actor-host``, ``python -m sky_monarch.actor_host``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from sky_monarch.errors import ConfigError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch.actors.keys import ActorKeys

__all__ = ["make_keys", "serve_host"]

_LONGEST_KEYS = 64 * 1024


def serve_host(
    *,
    listen: str | None,
    dial: str | None,
    keys: str | None,
    name: str | None,
    once: bool,
    within_s: float | None,
) -> None:
    """Serve programs until this process is told to end. See :func:`sky_monarch.actors.host_server.serve`.

    Args:
        listen: Where to listen.
        dial: Whom to dial.
        keys: A file, ``-`` for standard input; else the environment brings them.
        name: What people call this host.
        once: End with the first program.
        within_s: Longest wait for it, in seconds.

    Raises:
        SkyMonarchError: As ``serve`` raises.
    """
    from sky_monarch.actors.host_server import serve

    found = _keys(keys)
    signal.signal(signal.SIGTERM, _leave)
    # As a rank of a job it is alone in its place, and its agent ends all of it at once: also who would tidy up.
    run_id, replica = os.environ.get("SKY_MONARCH_RUN_ID"), os.environ.get("SKY_MONARCH_REPLICA", "")
    only = f"{run_id}/{replica}" if run_id else ""
    serve(found, listen=listen, dial=dial, name=name, once=once, within_s=within_s, only=only)


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _keys(where: str | None) -> ActorKeys:
    from sky_monarch.actors.keys import KEYS_ENV, ActorKeys

    if where == "-":
        return ActorKeys.from_text(sys.stdin.read(_LONGEST_KEYS), "standard input")
    if where is not None:
        return ActorKeys.load(where)
    found = ActorKeys.from_environment(os.environ)
    if found is None:
        raise ConfigError(
            "this host has no keys",
            hint=f"--keys FILE (made by `sky-monarch actor-keys`), or the environment variable {KEYS_ENV}",
        )
    return found


def make_keys(folder: str, hosts: int) -> list[str]:
    """Write ``client.key`` and ``host-0.key``, … to a folder that only this user can read; returns their paths.

    Raises:
        ConfigError: Some are there already, or the folder cannot be used.
    """
    from pathlib import Path

    from sky_monarch.actors.keys import ActorKeys

    at = Path(folder)
    client, made = ActorKeys.create(hosts)
    files = [("client.key", client), *((f"host-{number}.key", one) for number, one in enumerate(made))]
    there = [name for name, _ in files if (at / name).exists()]
    if there:
        raise ConfigError(f"{at / there[0]} is there already", hint="name a fresh folder")
    try:
        at.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{at} cannot be made: {error.strerror}") from error
    for name, one in files:
        one.save(at / name)
    return [str(at / name) for name, _ in files]


def main() -> None:
    """Run it with the options of ``sky-monarch actor-host``."""
    parser = argparse.ArgumentParser("sky-monarch actor-host")
    parser.add_argument("--listen")
    parser.add_argument("--dial")
    parser.add_argument("--keys")
    parser.add_argument("--name")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--within", type=float, dest="within_s")
    try:
        serve_host(**vars(parser.parse_args()))
    except SkyMonarchError as error:
        hint = getattr(error, "hint", None)
        sys.stderr.write(f"error: {error}\n" + (f"hint: {hint}\n" if hint else ""))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
