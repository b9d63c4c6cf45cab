"""A warm standby: a process that has imported what the job needs, and runs its script when it is told to.

``python -m sky_monarch.worker --standby [--preload a,b] -- python x.py args`` (or ``-- python -m mod args``)

With ``--until=session`` it is hot instead: it runs the script ahead, up to where
:mod:`sky_monarch.standby` makes it wait.

With ``--serve`` in place of ``--standby`` it imports, and then forks processes that are standbys
(:mod:`sky_monarch.fork_server`).

The modules may also be named by ``SKY_MONARCH_PRELOAD``. It is exec'd with the job's own interpreter, final
environment and device mask, imports the preload modules, and waits on file descriptor 3 for one line of
JSON, ``{"env": {…}}``: the variables that only the promotion knows. End of file there means that nobody
needs it. From then on it is as if ``python x.py args`` had been typed: same ``sys.argv``, ``__main__``,
``sys.path``, exit codes and tracebacks.

A standby never forks and starts no threads of its own. What it imports before the promotion is the job's
business.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn

from sky_monarch import fork_server, standby
from sky_monarch.standby import Promotion, PromotionError

__all__ = ["Command", "main"]

PROMOTION_FD = 3
_BAD_USAGE = 2
_MOST_SAID = 500  # characters of what could not be imported; the agent reads no longer lines
# Interpreter options that take their value from the next argument where it is not attached.
_VALUE_FLAGS = ("-W", "-X", "--check-hash-based-pycs")
_FLAGS_APPLIED = "--flags-applied"
_STANDBY = "--standby"
_SERVE = "--serve"
_UNTIL_SESSION = "--until=session"
# Says in a hot standby that began again as a warm one why it did.
_EARLY = "--early"
# What a standby must not know before it is promoted: a script that asked with it would be a second copy of a
# live group, where the lighthouse is TorchFT's and cannot tell the two apart.
_WITHHELD = ("TORCHFT_LIGHTHOUSE",)


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


def _preload(names: Sequence[str]) -> str:
    """Import what the job needs; a module that cannot be imported is the script's own affair.

    Returns:
        What could not be imported, and why, on one line; empty where all could.
    """
    failed = []
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code: anything may come
            what = f"cannot import {name}: {type(error).__name__}: {error}"
            sys.stderr.write(f"sky-monarch: preload: {what}\n")
            failed.append(what)
    return " ".join("; ".join(failed).split())[:_MOST_SAID]


@dataclass(frozen=True, slots=True)
class _Options:
    """The worker's own command line."""

    command: Command
    preload: list[str]
    hot: bool
    early: bool
    serve: bool
    flags_applied: bool

    @property
    def mode(self) -> list[str]:
        """The words that say what this process is for."""
        return [_SERVE if self.serve else _STANDBY, *([_UNTIL_SESSION] if self.hot else [])]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> _Options:
        """Read what comes before ``--``, and ``SKY_MONARCH_PRELOAD``.

        Raises:
            UsageError: It cannot be used.
        """
        listed = os.environ.pop("SKY_MONARCH_PRELOAD", "")
        options = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
        command = Command.parse(argv[len(options) + 1 :])
        switches = (_STANDBY, _SERVE, _FLAGS_APPLIED, _UNTIL_SESSION, _EARLY)
        preload = [item for item in listed.split(",") if item]
        words = iter(word for word in options if word not in switches)
        for word in words:
            name, _, value = word.partition("=")
            if name != "--preload":
                raise UsageError(f"unknown option {word!r}")
            preload += [item for item in (value or next(words, "")).split(",") if item]
        if (_STANDBY in options) == (_SERVE in options):
            raise UsageError(f"one of {_STANDBY} and {_SERVE} is needed")
        return cls(
            command,
            preload,
            hot=_UNTIL_SESSION in options,
            early=_EARLY in options,
            serve=_SERVE in options,
            flags_applied=_FLAGS_APPLIED in options,
        )


def _begin_again(command: Command, *options: str) -> NoReturn:
    """The same pid starts anew, with the interpreter's own options, which exist only from its start."""
    words = ["-m", "sky_monarch.worker", _FLAGS_APPLIED, *options, "--"]
    # What Python was called for the job stands for itself: the interpreter is this one.
    os.execv(sys.executable, [sys.executable, *command.flags, *words, sys.executable, *command.words])  # noqa: S606


def _run_ahead(options: _Options, missing: str) -> None:
    """Run the script before the promotion; where it ends without having waited for it, begin again, warm.

    The promotion, which may have come meanwhile, is then read by the process that knows what to do with it.
    """
    env, folder = dict(os.environ), os.getcwd()  # noqa: PTH109
    for name in _WITHHELD:
        os.environ.pop(name, None)
    promotion = Promotion(PROMOTION_FD)
    _confess(promotion, missing)
    standby.hold(promotion)
    try:
        options.command.run()
    except BaseException:
        if not standby.release():
            raise
        traceback.print_exc()
    else:
        if not standby.release():
            return
    sys.stderr.write("sky-monarch: standby: the script ended before it entered a session\n")
    atexit._run_exitfuncs()  # its children and temporary files go; `exec` would leave them
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env, SKY_MONARCH_PRELOAD=",".join(options.preload))
    os.set_inheritable(PROMOTION_FD, True)
    _begin_again(options.command, _STANDBY, _EARLY)


def _confess(promotion: Promotion, missing: str) -> None:
    """Say that this standby is not as warm as it was meant to be."""
    if missing:
        promotion.announce(f"short {missing}")


def _stand_by(options: _Options, missing: str) -> None:
    """Wait for the promotion, with the imports done, and become the rank.

    Raises:
        SystemExit: Nobody needs this process.
        PromotionError: The promotion cannot be used.
    """
    promotion = Promotion(PROMOTION_FD)
    if options.early:
        promotion.announce("early")
    _confess(promotion, missing)
    promotion.announce()
    env = promotion.read()
    if env is None:
        raise SystemExit(0)
    promotion.accept(env)


def main(argv: Sequence[str]) -> None:
    """Stand by, then run the command; whatever it raises goes on to the interpreter.

    Raises:
        SystemExit: The command line or the promotion is unusable (code 2), nobody needs this process (code
            0), or the script said so.
    """
    try:
        options = _Options.parse(argv)
        command = options.command
        if command.flags and not options.flags_applied:
            os.environ["SKY_MONARCH_PRELOAD"] = ",".join(options.preload)
            _begin_again(command, *options.mode)
        if not sys.flags.safe_path:
            sys.path[0] = command.first_path()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nobody wants a traceback of a process that only waits
        missing = _preload(options.preload)
        if options.serve:
            options = replace(options, serve=False, hot=fork_server.serve(missing).ahead)
        if not options.hot:
            _stand_by(options, missing)
    except (UsageError, PromotionError, OSError) as error:
        sys.stderr.write(f"error: worker: {error}\n")
        raise SystemExit(_BAD_USAGE) from None
    try:
        if options.hot:
            _run_ahead(options, missing)
        else:
            command.run()
    except SystemExit:
        raise
    except BaseException:
        _hide_worker_frames()
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
