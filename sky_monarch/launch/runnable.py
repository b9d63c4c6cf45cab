"""Whether what a job runs is there at all, as far as that is certain before anything is started.

A rank whose script is missing fails the same way however often it is started. Nothing is said where a shell reads the
command, where `setup` may still bring what is missing, and of what only other machines have.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sky_monarch.config.command import rank_command
from sky_monarch.errors import ConfigError
from sky_monarch.launch.environment import caller_value

if TYPE_CHECKING:
    from sky_monarch.config import JobSpec

__all__ = ["require_preload", "require_runnable"]

_PYTHON = re.compile(r"python[0-9.]*")
_VALUE_FLAGS = ("-W", "-X", "--check-hash-based-pycs")
_NO_SCRIPT = ("-m", "-c", "-", "-i", "-h", "-V", "--help", "--version")
#: Of torchrun: then what follows is no script of Python's.
_TORCHRUN_OTHER = frozenset(("-m", "--module", "--no-python", "--no_python"))
_MOST_LISTED = 1000


def require_runnable(job: JobSpec, *, here: Mapping[str, str] | None, shipped: Collection[str] = ()) -> None:
    """Refuse a job whose command certainly cannot be started.

    Args:
        job: Its ``workdir`` is a folder of this machine.
        here: Environment of its ranks where they run on this machine; None where they run on others, which have
            programs of their own.
        shipped: What other machines get of the working folder, relative.

    Raises:
        ConfigError: Its program or its script is not there.
    """
    command = rank_command(job.run)
    if job.setup.strip() or command["kind"] != "exec":
        return
    workdir, (program, *words) = job.resolved_workdir(), command["argv"]
    if "/" in program:
        _require_program(workdir, program, is_here=here is not None)
    elif here is not None and shutil.which(program, path=_path(job, here)) is None:
        raise ConfigError(
            f"run: there is no program {program!r} in PATH", hint=_program_hint(workdir, program)
        )
    script = _script(program.rpartition("/")[2], words)
    if script is None or (here is None and os.path.isabs(script)):  # noqa: PTH117
        return
    if not (workdir / script).exists():
        raise ConfigError(
            f"run: {script} is not there: {workdir / script}", hint=_script_hint(workdir, script)
        )
    name = os.path.normpath(script)
    if here is None and name not in shipped and _is_plain_file(workdir, name):
        raise ConfigError(
            f"run: {script} is not sent to the hosts: it is ignored, as git has it",
            hint="take it out of .gitignore, or name another one (`sky-monarch plan` shows how much is sent)",
        )


def require_preload(job: JobSpec, *, here: Mapping[str, str]) -> None:
    """Refuse modules to be imported ahead of time that the job's own interpreter certainly does not have.

    Args:
        job: It runs on this machine.
        here: Environment of its ranks.

    Raises:
        ConfigError: One of them is not there.
    """
    command = rank_command(job.run)
    if not job.preload or job.setup.strip() or command["kind"] != "exec":
        return
    program, *words = command["argv"]
    found = shutil.which(program, path=_path(job, here))
    # Of this very environment: another one has other modules.
    is_ours = found is not None and Path(found).absolute().parent == Path(sys.executable).absolute().parent
    elsewhere = "PYTHONPATH" in {*job.envs, *job.secrets} or here.get("PYTHONPATH") != caller_value(
        "PYTHONPATH"
    )
    if not (is_ours and _PYTHON.fullmatch(program.rpartition("/")[2])) or elsewhere:
        return
    workdir = job.resolved_workdir()
    script = _script(program.rpartition("/")[2], words)
    folders = [workdir, *([(workdir / script).resolve().parent] if script else [])]
    for name in job.preload:
        top = name.partition(".")[0]
        if not _is_importable(top, folders):
            near = difflib.get_close_matches(top, _importable(folders), 1)
            raise ConfigError(
                f"preload: there is no module {top!r} for {found}",
                hint=f"did you mean {near[0]!r}?"
                if near
                else "install it there, or take it out of `preload`",
            )


def _path(job: JobSpec, here: Mapping[str, str]) -> str:
    return job.secrets.get("PATH") or job.envs.get("PATH") or here.get("PATH", os.defpath)


def _script(program: str, words: Sequence[str]) -> str | None:
    """The file that Python, or torchrun, is to run; None where there is none, or it is not certain."""
    if program == "torchrun":
        options = {word.partition("=")[0] for word in words}
        return None if options & _TORCHRUN_OTHER else next((w for w in words if w.endswith(".py")), None)
    if not _PYTHON.fullmatch(program):
        return None
    rest = iter(words)
    for word in rest:
        if word in _VALUE_FLAGS:
            next(rest, None)
        elif word in _NO_SCRIPT or word.startswith(("-m", "-c")):
            return None
        elif not word.startswith("-"):
            return word
    return None


def _require_program(workdir: Path, program: str, *, is_here: bool) -> None:
    path = workdir / program
    if not is_here and path.is_absolute() and program.startswith("/"):
        return
    if not path.exists():
        if not is_here:
            return  # hosts may have it, or make it
        raise ConfigError(f"run: {program} is not there: {path}", hint=_script_hint(workdir, program))
    if path.is_dir():
        raise ConfigError(
            f"run: {path} is a folder", hint="name the program in it, or `python` and the folder"
        )
    if not os.access(path, os.X_OK):
        python = f", or write `run: python {program}`" if program.endswith(".py") else ""
        raise ConfigError(f"run: {path} may not be executed", hint=f"chmod +x {path}{python}")


def _program_hint(workdir: Path, program: str) -> str:
    if (workdir / program).is_file():
        return f"run: python {program}" if program.endswith(".py") else f"run: ./{program}"
    near = difflib.get_close_matches(program, ("python", "python3", "torchrun", "bash"), 1)
    return f"did you mean {near[0]!r}?" if near else "install it, name its path, or let `setup` bring it"


def _script_hint(workdir: Path, script: str) -> str:
    folder, _, name = script.rpartition("/")
    try:
        names = [
            entry.name for _, entry in zip(range(_MOST_LISTED), (workdir / folder).iterdir(), strict=False)
        ]
    except OSError:
        names = []
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {'/'.join(filter(None, (folder, near[0])))}? " if near else ""
    return f"{meant}paths in `run` begin at `workdir`, which is {workdir}"


def _is_plain_file(workdir: Path, name: str) -> bool:
    """Whether the listing of what is sent would have named it: what lies behind a link it names as the link."""
    path = workdir / name
    inside = [folder for folder in path.parents if folder != workdir and workdir in folder.parents]
    return not name.startswith("..") and path.is_file() and not any(folder.is_symlink() for folder in inside)


def _is_importable(top: str, folders: Sequence[Path]) -> bool:
    if any((folder / f"{top}.py").exists() or (folder / top).is_dir() for folder in folders):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return True  # a module of which that cannot be said


def _importable(folders: Sequence[Path]) -> list[str]:
    import importlib.metadata

    own = [path.stem for folder in folders for path in folder.glob("*.py")]
    return [*own, *sys.stdlib_module_names, *importlib.metadata.packages_distributions()]
