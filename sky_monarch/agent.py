"""The agent's process: ``python -m sky_monarch.agent CONFIG``. Everything it does is in the Rust core.

The process itself is its keeper; the agent is a child of it. On a host that was provisioned,
``python -m sky_monarch.agent --enrol FOLDER`` first writes its configuration, from the environment into FOLDER.
With ``--notice DIR`` it tells an agent that runs that its host is about to be taken away.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sky_monarch import __version__
from sky_monarch.errors import ConfigError, SkyMonarchError
from sky_monarch.keeper import keep

__all__ = ["main"]

# For what a killed agent left to disappear: more than that is an uninterruptible sleep.
_END_ORPHANS_S = 10.0


_ENROL = "--enrol"


def _become_enrolled(folder: Path) -> NoReturn:
    """Enrol this host, or the head, and go on as its agent, in place of this program.

    In place of it, because the kernel shows to others what a program was started with, secrets among it, for as long
    as it runs.
    """
    from sky_monarch.enrolment import clean_environment, enrol, told  # of no use to any other agent

    if isinstance(told(os.environ).get("head"), dict):
        from sky_monarch.head import become_head  # which needs more than a host has

        config = become_head(folder, os.environ, version=__version__)
    else:
        config = enrol(folder, os.environ, version=__version__)
    run_id = str(json.loads(config.read_text(encoding="utf-8")).get("run_id", ""))
    words = sys.orig_argv  # with the interpreter's own options
    start = words[1 : words.index(_ENROL)] if _ENROL in words else ["-m", "sky_monarch.agent"]
    sys.stderr.flush()
    argv = [sys.executable, *start, str(config)]
    os.execve(sys.executable, argv, clean_environment(os.environ, run_id))  # noqa: S606  (a shell is not wanted)


def _read(arguments: Sequence[str]) -> str:
    if len(arguments) == 2 and arguments[0] == _ENROL:
        _become_enrolled(Path(arguments[1]).absolute())
    if len(arguments) != 1:
        raise ConfigError(
            "usage: python -m sky_monarch.agent CONFIG, or --enrol FOLDER on a host that was provisioned"
        )
    try:
        return Path(arguments[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the agent's configuration: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to end.

    Args:
        arguments: Path of its configuration, or ``--enrol`` and a folder; by default from the command line.

    Returns:
        The exit code.
    """
    try:
        words = sys.argv[1:] if arguments is None else arguments
        if words[:1] == ["--notice"]:
            from sky_monarch import notice

            return notice.main(words[1:])
        config = _read(words)
        try:
            from sky_monarch import _core
        except ImportError as error:
            raise SkyMonarchError(
                f"the compiled core is missing: {error}", hint="install the wheel of this platform"
            ) from error

        def end_orphans() -> None:
            killed, left = _core.end_descendants(_END_ORPHANS_S)
            if killed:
                sys.stderr.write(f"keeper: killed what the agent left: {killed}\n")
            if left:
                sys.stderr.write(f"keeper: alive all the same: {left}\n")

        _core.adopt_orphans()
        return keep(lambda: int(_core.run_agent(config)), end_orphans)
    except SkyMonarchError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
