"""The page ``docs/reference/cli.md``: what a user may type, without the processes that a launch starts.

``python -m sky_monarch.cli.reference > docs/reference/cli.md`` writes it.
"""

from __future__ import annotations

import sys
from typing import cast

import typer
from typer.cli import get_docs_for_click

from sky_monarch.cli import app

__all__ = ["cli_page"]

_NAME = "sky-monarch"


def cli_page() -> str:
    """The whole page, as Markdown."""
    group = typer.main.get_group(app)
    group.commands = {name: one for name, one in group.commands.items() if not one.hidden}
    # In a context of its own the page has `-h`, too: by default typer describes the options of its own command line.
    context = cast("typer.Context", group.make_context(_NAME, [], resilient_parsing=True))
    return f"{get_docs_for_click(obj=group, ctx=context, name=_NAME, title='CLI').strip()}\n"


if __name__ == "__main__":
    sys.stdout.write(cli_page())
