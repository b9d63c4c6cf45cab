"""``sky-monarch actor-host`` and ``sky-monarch actor-keys``."""

from __future__ import annotations

from typing import Annotated

import typer

from sky_monarch.cli import _output

__all__ = ["actor_host", "actor_keys"]


def actor_host(
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where the program may dial.")
    ] = None,
    dial: Annotated[
        str | None, typer.Option("--dial", metavar="HOST:PORT", help="Where the program waits for its hosts.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            help="Keys of this host, - for standard input. Else ACTOR_KEYS brings them.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What reports call this host.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the first program is gone.")] = False,
    within_s: Annotated[
        float | None, typer.Option("--within", metavar="SECONDS", help="Longest wait for a program.")
    ] = None,
) -> None:
    """Let a program elsewhere run its actors on this host: `attach_to_hosts([...])` there.

    All that it starts here ends with it. With --listen the next program is served after it.
    """
    from sky_monarch.actor_host import serve_host

    serve_host(listen=listen, dial=dial, keys=keys, name=name, once=once, within_s=within_s)


def actor_keys(
    folder: Annotated[str, typer.Argument(help="Where to write them; made where it is missing.")],
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="How many hosts there will be.")] = 1,
) -> None:
    """Make the keys with which a program and its hosts know each other. They are good for a week.

    client.key stays with the program; host-0.key, host-1.key, … go to one host each.
    """
    from sky_monarch.actor_host import make_keys

    for path in make_keys(folder, hosts):
        _output.print_line(path)
