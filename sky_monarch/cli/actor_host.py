"""``sky-monarch actor-host``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["actor_host"]


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
