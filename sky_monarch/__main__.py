"""The ``sky-monarch`` command, also as ``python -m sky_monarch``."""

from __future__ import annotations

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends it with 130, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing has been started yet; the command group puts Python's handler back.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from sky_monarch.cli import main as run

    run()


if __name__ == "__main__":
    main()
