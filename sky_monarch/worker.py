"""A warm standby: a process that has imported what the job needs, and runs its script when it is told to.

``python -m sky_monarch.worker --standby [--preload a,b] -- python x.py args`` (or ``-- python -m mod args``)

The modules may also be named by ``SKY_MONARCH_PRELOAD``. It is exec'd with the job's own interpreter, final
environment and device mask, imports the preload modules, and waits on file descriptor 3 for one line of
JSON, ``{"env": {…}}``: the variables that only the promotion knows. End of file there means that nobody
needs it. From then on it is as if ``python x.py args`` had been typed: same ``sys.argv``, ``__main__``,
``sys.path``, exit codes and tracebacks.

The process never forks and starts no threads of its own. What it imports before the promotion is the job's
business.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import stat
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Command", "main"]

PROMOTION_FD = 3
# A line of environment; the kernel's own limit for a whole environment is 2 MiB (ARG_MAX).
_MOST_BYTES = 4 * 1024 * 1024
_BAD_USAGE = 2
# Interpreter options that take their value from the next argument where it is not attached.
_VALUE_FLAGS = ("-W", "-X", "--check-hash-based-pycs")
_FLAGS_APPLIED = "--flags-applied"


class UsageError(Exception):
    """The command line cannot be run warm."""


@dataclass(frozen=True, slots=True)
class Command:
    """A python command line, taken apart.

    Attributes:
        flags: The interpreter's own options, such as ``-O``.
        module: Whether ``target`` is a module (``-m``) or a path.
        target: What runs.
        arguments: Of the script.
        words: All of it, as it was given.
    """

    flags: tuple[str, ...]
    module: bool
    target: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Command:
        """Take ``python [flags] (x.py | -m mod) args`` apart.

        Raises:
            UsageError: It is not of this form; such a command must be started cold.
        """
        if not argv:
            raise UsageError("no command after --")
        rest = list(argv[1:])
        flags: list[str] = []
        while rest:
            word = rest.pop(0)
            if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
                target = word[2:] or (rest.pop(0) if rest else "")
                if not target:
                    raise UsageError("-m needs the name of a module")
                return cls(tuple(flags), True, target, tuple(rest), tuple(argv[1:]))
            if word.endswith(".pyc"):
                raise UsageError(f"{word!r} cannot run warm; start it cold")
            if word in ("-", "-c", "-i", "-h", "-V", "--help", "--version") or word.startswith("-c"):
                raise UsageError(f"{word!r} cannot run warm; start it cold")
            if not word.startswith("-"):
                return cls(tuple(flags), False, word, tuple(rest), tuple(argv[1:]))
            flags.append(word)
            if word in _VALUE_FLAGS:
                if not rest:
                    raise UsageError(f"{word} needs a value")
                flags.append(rest.pop(0))
        raise UsageError("the command names no script and no module")

    def run(self) -> None:
        """Run it as ``__main__`` of this process, as the interpreter itself would."""
        package = not self.module and _is_package_path(self.target)
        sys.argv[:] = ["-m" if self.module else self.target, *self.arguments]
        sys.orig_argv[:] = [sys.orig_argv[0], *self.words]
        main_module = types.ModuleType("__main__")
        # As in a fresh interpreter: `__annotations__` exists, and `__builtins__` is the module.
        main_module.__dict__.update(__annotations__={}, __builtins__=importlib.import_module("builtins"))
        sys.modules["__main__"] = main_module
        if self.module:
            # What `python -m` calls, and the only function that sets `__spec__`, `sys.argv[0]` and errors
            # as it does.
            runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]
        elif (
            package and importlib.machinery.PathFinder.find_spec("__main__", [_absolute(self.target)]) is None
        ):
            sys.stderr.write(
                f"{sys.executable}: can't find '__main__' module in {_absolute(self.target)!r}\n"
            )
            raise SystemExit(1)
        elif package:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            _run_script(self.target, main_module)

    def first_path(self) -> str:
        """What python itself would put at ``sys.path[0]``."""
        if self.module:
            return os.getcwd()  # noqa: PTH109
        if _is_package_path(self.target):
            return _absolute(self.target)
        return os.path.dirname(os.path.realpath(self.target))  # noqa: PTH120


def _is_package_path(target: str) -> bool:
    """A folder or zip archive: its ``__main__`` runs."""
    return pkgutil.get_importer(target) is not None


def _absolute(path: str) -> str:
    """As the interpreter does it: not normalised."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118


def _run_script(target: str, main_module: types.ModuleType) -> None:
    path = _absolute(target)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(_BAD_USAGE) from None
    main_module.__dict__.update(
        __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
    )
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102  # this is what a worker is for


def _read_promotion() -> dict[str, str] | None:
    """Wait for the line that promotes this process; None when it is not needed.

    Raises:
        UsageError: What arrived is no such line.
    """
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(PROMOTION_FD, 65536)
        if not part:
            if data:
                raise UsageError("the promotion ended in mid-line")
            return None
        data += part
        if len(data) > _MOST_BYTES:
            raise UsageError(f"the promotion is longer than {_MOST_BYTES} bytes")
    try:
        env = json.loads(data)["env"]
        if not isinstance(env, dict) or not all(
            isinstance(text, str) for pair in env.items() for text in pair
        ):
            raise TypeError("env must map text to text")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the promotion is malformed: {error}"
        ) from error  # never its content: it holds secrets
    return env


def _announce() -> None:
    """Say that the imports are done, where the other end can hear it."""
    if stat.S_ISSOCK(os.fstat(PROMOTION_FD).st_mode):
        # Promoted before it was ready: the other end is closed, and the promotion waits to be read.
        with socket.socket(fileno=os.dup(PROMOTION_FD)) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(b"ready\n")


def _hide_worker_frames() -> None:
    """Let the interpreter report the exception under way as if the worker were not on the stack.

    Only the hook that prints is replaced, and only now: the interpreter itself then runs it, the exit
    handlers, and what a KeyboardInterrupt or an error inside a hook needs.
    """
    hook = sys.excepthook

    def without_worker(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        frame, below = trace, trace
        while frame is not None:
            if frame.tb_frame.f_globals is globals():
                below = frame.tb_next
            frame = frame.tb_next
        hook(kind, value.with_traceback(below), below)

    sys.excepthook = without_worker


def _preload(names: Sequence[str]) -> None:
    """Import what the job needs; a module that cannot be imported is the script's own affair."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # user code: anything may come
            sys.stderr.write(f"sky-monarch: preload: cannot import {name}: {type(error).__name__}: {error}\n")


def main(argv: Sequence[str]) -> None:
    """Stand by, then run the command; whatever it raises goes on to the interpreter.

    Raises:
        SystemExit: The command line or the promotion is unusable (code 2), nobody needs this process (code
            0), or the script said so.
    """
    listed = os.environ.pop("SKY_MONARCH_PRELOAD", "")
    options = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    try:
        command = Command.parse(argv[len(options) + 1 :])
        flags_applied = _FLAGS_APPLIED in options
        preload = [item for item in listed.split(",") if item]
        words = iter(word for word in options if word not in ("--standby", _FLAGS_APPLIED))
        for word in words:
            name, _, value = word.partition("=")
            if name != "--preload":
                raise UsageError(f"unknown option {word!r}")
            preload += [item for item in (value or next(words, "")).split(",") if item]
        if "--standby" not in options:
            raise UsageError("--standby is missing")
        if command.flags and not flags_applied:
            # The interpreter's own options exist only from its start: the same pid begins again, with them.
            os.environ["SKY_MONARCH_PRELOAD"] = ",".join(preload)
            os.execv(  # noqa: S606
                sys.executable,
                [sys.executable, *command.flags, "-m", "sky_monarch.worker", _FLAGS_APPLIED, *argv],
            )
        if not sys.flags.safe_path:
            sys.path[0] = command.first_path()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nobody wants a traceback of a process that only waits
        _preload(preload)
        _announce()
        env = _read_promotion()
    except (UsageError, OSError) as error:
        sys.stderr.write(f"error: worker: {error}\n")
        raise SystemExit(_BAD_USAGE) from None
    if env is None:
        raise SystemExit(0)
    os.close(PROMOTION_FD)
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.run()
    except SystemExit:
        raise
    except BaseException:
        _hide_worker_frames()
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
