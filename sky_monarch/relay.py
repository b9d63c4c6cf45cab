"""The relay's process: ``python -m sky_monarch.relay CONFIG``, a service of the head's agent.

It joins the streams of hosts that reach nobody but the head (``rust_core/src/tunnel.rs``). This module only hands its
configuration to the core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sky_monarch.errors import ConfigError, SkyMonarchError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the relay until it is told to end.

    Args:
        arguments: Path of its configuration; by default from the command line.

    Returns:
        The exit code: 0 after SIGTERM.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if len(given) != 1:
            raise ConfigError("usage: python -m sky_monarch.relay CONFIG")
        try:
            config = Path(given[0]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the relay's configuration: {error}") from error
        try:
            from sky_monarch import _core
        except ImportError as error:
            hint = "install the wheel of this platform"
            raise SkyMonarchError(f"the compiled core is missing: {error}", hint=hint) from error
        return int(_core.run_relay(config))
    except SkyMonarchError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
