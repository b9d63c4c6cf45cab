"""The ``sky-monarch`` command, also as ``python -m sky_monarch``."""

from __future__ import annotations

import gc
import os
import signal
import sys

__all__ = ["main"]

_GARBAGE = 50_000  # objects between two searches


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends it with 130, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing has been started yet; the command group puts Python's handler back.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    _hide_values()
    # What is imported stays: Python would search all of it for garbage dozens of times, a tenth of a `status`.
    gc.set_threshold(_GARBAGE)
    from sky_monarch.cli import main as run

    run()


def _hide_values() -> None:
    """Overwrite what `--env K=V` and `--secret K=V` say in this process's own command line, as `ps` shows it.

    Linux shows the memory that the kernel put the arguments in; Python has made its own copies long ago.
    """
    options = ("--env", "--secret")
    hidden: list[str] = []
    for before, text in zip(sys.argv, sys.argv[1:], strict=False):
        option, _, rest = text.partition("=")
        if before in options and "=" in text:
            hidden.append(text)
        elif option in options and "=" in rest:
            hidden.append(rest)
    if not hidden or not sys.platform.startswith("linux"):
        return
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as stat, open("/proc/self/cmdline", "rb") as cmdline:  # noqa: PTH123
            fields = stat.read().rpartition(b")")[2].split()
            arguments = cmdline.read()
        start, end = int(fields[45]), int(fields[46])  # fields 48 and 49, arg_start and arg_end
    except (OSError, ValueError, IndexError):
        return
    if end - start != len(arguments) or ctypes.string_at(start, len(arguments)) != arguments:
        return  # not the memory that it should be: leave it alone
    for text in hidden:
        key, _, value = (os.fsencode(part) for part in text.partition("="))
        needle = key + b"=" + value + b"\0"
        at = arguments.find(needle)
        while at >= 0 and value:
            ctypes.memset(start + at + len(key) + 1, ord("x"), len(value))
            at = arguments.find(needle, at + 1)


if __name__ == "__main__":
    main()
