"""``sky-monarch actor-keys``."""

from __future__ import annotations

from typing import Annotated

import typer

from sky_monarch.cli import _output

__all__ = ["actor_keys"]


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
