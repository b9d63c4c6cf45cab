"""The command line: ``sky-monarch``. One module a command; each imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sky_monarch.cli import (
    _output,
    actor_host,
    actor_keys,
    attach,
    debug,
    debug_bundle,
    doctor,
    down,
    events,
    init,
    logs,
    plan,
    processes,
    scale,
    status,
    up,
    validate,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="sky-monarch",
    cls=_output.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from sky_monarch import __version__

        _output.print_line(f"sky-monarch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_tracebacks: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[  # noqa: ARG001  (its callback acts)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train on GPUs that crash and get pre-empted, and lose almost nothing.

    Exit codes: 0 done, 1 the run failed, 2 bad input, 3 no capacity, 4 restarts exhausted or min_replicas
    not held, 5 setup failed, 6 no such run, 7 the name is taken by a live run, 8 cancelled by `down`,
    9 the budget was spent, 130 Ctrl-C, 143 SIGTERM.
    """
    if show_tracebacks:
        _output.use_debug()


app.command("up")(up.up)
app.command("plan")(plan.plan)
app.command("attach")(attach.attach)
app.command("status")(status.status)
app.command("logs")(logs.logs)
app.command("events")(events.events)
app.command("scale")(scale.scale)
app.command("down")(down.down)
app.command("debug")(debug.debug)
app.command("debug-bundle")(debug_bundle.debug_bundle)
app.command("doctor")(doctor.doctor)
app.command("actor-host")(actor_host.actor_host)
app.command("actor-keys")(actor_keys.actor_keys)
app.command("validate")(validate.validate)
app.command("init")(init.init)
app.command("agent", hidden=True)(processes.agent)
app.command("controller", hidden=True)(processes.controller)
app.command("lighthouse", hidden=True)(processes.lighthouse)


def main() -> None:
    """Entry point of the ``sky-monarch`` command."""
    _output.open_standard_streams()
    try:
        app()
    except SystemExit as leaving:
        # A mistake in the command line itself ends before any command could choose JSON.
        if leaving.code == 2 and "--json" in sys.argv and not _output.json_printed():
            _output.print_json({"error": {"kind": "UsageError", "message": "see stderr", "hint": None}})
        raise
