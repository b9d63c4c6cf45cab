"""Starts a run on this machine, and ends what is left of one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sky_monarch import __version__
from sky_monarch.errors import ConfigError, LaunchError, RunExistsError, SystemCallError
from sky_monarch.launch.environment import agent_environment
from sky_monarch.launch.folder import Phase, RunFolder, list_runs, name_lock, write_json
from sky_monarch.launch.plan import LocalPlan
from sky_monarch.launch.process import Process, carrying, end

__all__ = ["check_resumable", "deaf", "finish", "launch", "reap", "require_core", "resume", "spawn"]

_POLL_S = 0.05
_GRACE_S = 3.0
_LEAST_BYTES = 4 * 2**20


def require_core() -> None:
    """Refuse where this installation has no compiled core.

    Raises:
        ConfigError: It has none.
    """
    if importlib.util.find_spec("sky_monarch._core") is None:
        raise ConfigError(
            "this installation has no compiled core, so it can launch elsewhere but not on this machine",
            hint="install the wheel of this platform, or run `pip install .` with a Rust toolchain",
        )


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _refuse_taken(name: str, state: Path, *, but: RunFolder | None = None) -> None:
    for folder in reversed(list_runs(state)):
        if folder.name == name and folder != but and (holder := folder.holder()):
            raise RunExistsError(
                f"a run named {name!r} is live: {folder.run_id} ({holder})",
                hint=f"`sky-monarch attach {name}` to watch it, `sky-monarch down {name}` to end it, "
                "or another name with -n",
            )


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for the length of a clean-up, which has its own deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _require_room(folder: Path) -> None:
    """Refuse to begin what the disk could not hold: a run that cannot note its own end is hard to end.

    Raises:
        LaunchError: There is too little room.
    """
    free = shutil.disk_usage(folder).free
    if free < _LEAST_BYTES:
        raise LaunchError(
            f"{folder} has {free // 1024} KiB left: too little for the journal, the logs and the last status of a run",
            hint=f"make room for {_LEAST_BYTES // 2**20} MiB there, or name another place: SKY_MONARCH_STATE_DIR",
        )


def _take(plan: LocalPlan) -> RunFolder:
    """Make the run folder with ``run.json`` in it: from here on ``status`` lists the run."""
    folder = RunFolder(plan.run_dir)
    _make_private(plan.state)
    _make_private(plan.run_dir.parent)
    _require_room(plan.run_dir.parent)
    own = Process.of(os.getpid())
    with name_lock(plan.name, plan.state):
        _refuse_taken(plan.name, plan.state)
        for leftover in plan.run_dir.parent.iterdir():  # of launchers killed between mkdir and run.json
            with contextlib.suppress(OSError):
                leftover.rmdir()
        try:
            plan.run_dir.mkdir(mode=0o700)
            write_json(
                plan.run_dir / "run.json",
                {
                    **plan.run_json,
                    "created_ms": time.time_ns() // 1_000_000,
                    "launcher_pid": os.getpid(),
                    "launcher_start_ticks": own.start_ticks if own else 0,
                },
            )
        except FileExistsError as error:  # of two ids with the same random end in one second
            raise LaunchError(f"{plan.run_dir} exists already", hint="try again") from error
        except BaseException:
            with deaf():
                folder.remove()
            raise
    return folder


def spawn(folder: RunFolder, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process that a run has here, which outlives this one."""
    who = folder.supervisor
    log = os.open(folder.path / f"{who}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        agent = subprocess.Popen(
            list(argv),
            cwd=folder.path,
            env=agent_environment(folder.run_id),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C and hang-up are not for it
        )
    finally:
        os.close(log)
    # Somebody must wait for it, or it stays a zombie for as long as this process lives.
    threading.Thread(target=agent.wait, name="agent-reaper", daemon=True).start()
    if started := Process.of(agent.pid):
        write_json(folder.path / f"{who}.pid", {"pid": started.pid, "start_ticks": started.start_ticks})
    return agent


def _await_controller(
    folder: RunFolder, agent: subprocess.Popen[bytes], ready: Callable[[RunFolder], bool], deadline_s: float
) -> None:
    start = time.monotonic()
    while not ready(folder) and folder.phase() is not Phase.ENDED:
        if agent.poll() is not None and folder.phase() is not Phase.ENDED:
            who = folder.supervisor
            raise LaunchError(f"the {who} ended with code {agent.returncode} before the controller answered")
        if (
            folder.phase() is Phase.LAUNCHING
        ):  # a head that is being launched takes minutes: who does it has a limit
            start = time.monotonic()
        if time.monotonic() - start > deadline_s:
            raise LaunchError(f"the controller did not answer within {deadline_s:.0f} s")
        time.sleep(_POLL_S)


def launch(
    plan: LocalPlan,
    *,
    ready: Callable[[RunFolder], bool],
    deadline_s: float = 60.0,
    prepare: Callable[[Path], None] | None = None,
    undo: Callable[[RunFolder, str], None] | None = None,
) -> RunFolder:
    """Start a run, and return once its controller answers.

    Killed at any moment, this leaves either nothing or a run that ``status`` lists and ``down`` ends.

    Args:
        plan: What to write and start.
        ready: Says whether the controller of that run answers.
        deadline_s: Longest wait for that.
        prepare: Puts what else the run needs into its folder, before anything is started.
        undo: Ends what was begun elsewhere, for this reason, before what is here is ended.

    Raises:
        RunExistsError: A live run has this name.
        LaunchError: The processes did not come up; they are ended, the folder is kept for its logs. Or this
            installation cannot run agents: nothing was written.
    """
    require_core()
    try:
        folder = _take(plan)
    except OSError as error:
        raise LaunchError(
            f"the run folder {plan.run_dir} could not be made: {error.strerror or error}",
            hint="SKY_MONARCH_STATE_DIR names another place for runs",
        ) from error
    try:
        _make_private(plan.socket_dir)
        for name, content in plan.files.items():
            write_json(plan.run_dir / name, content)
        if prepare is not None:
            prepare(plan.run_dir)
        agent = spawn(folder, plan.agent_argv)
        _await_controller(folder, agent, ready, deadline_s)
    except Exception as error:
        with deaf():
            logs = folder.tail()
            if undo is not None:
                undo(folder, f"launch failed: {error}")
            reap(folder, grace_s=_GRACE_S)
            with contextlib.suppress(SystemCallError):  # a full disk is told as what it broke first
                finish(folder, state="FAILED", reason=f"launch failed: {error}", exit_code=1)
        if isinstance(error, OSError):
            raise LaunchError(f"the run could not be started: {error}") from error
        if isinstance(error, LaunchError):
            message = f"{error}\n{logs}" if logs else str(error)
            raise LaunchError(message, hint=f"the logs are in {folder.path}") from error
        raise
    except BaseException:  # Ctrl-C: the run was never handed to anybody
        with deaf():
            if undo is not None:
                undo(folder, "interrupted while it was being launched")
                reap(folder, grace_s=_GRACE_S)
                finish(folder, state="CANCELLED", reason="interrupted", exit_code=130)
            elif left := reap(folder, grace_s=_GRACE_S):
                finish(folder, state="CANCELLED", reason=f"interrupted; still alive: {left}", exit_code=130)
            else:
                folder.remove()
        raise
    return folder


def check_resumable(folder: RunFolder) -> None:
    """Refuse to take up what cannot be taken up again.

    Raises:
        LaunchError: Files are missing, or it is of another version.
    """
    if not folder.resumable:
        raise LaunchError(
            f"{folder.run_id} cannot be taken up again: not all of its files are left",
            hint=f"`sky-monarch down {folder.run_id}` ends what remains of it",
        )
    if (stated := folder.info.get("version")) != __version__:
        raise LaunchError(
            f"{folder.run_id} was launched by sky-monarch {stated}, and this is {__version__}: a run is of one "
            "version",
            hint=f"`pip install sky-monarch=={stated}` to take it up again",
        )


def resume(folder: RunFolder, *, ready: Callable[[RunFolder], bool], deadline_s: float = 60.0) -> bool:
    """Start the agent of a lost run again: its controller goes on with the journal, its budgets and its id.

    The ranks died with their agent; whatever else is left is ended first, so that nothing lives twice.

    Args:
        folder: Of the run.
        ready: Says whether the controller of that run answers.
        deadline_s: Longest wait for that.

    Returns:
        False where there is nothing to do: it is live, or it has ended.

    Raises:
        RunExistsError: Another live run has its name.
        LaunchError: It cannot be taken up again, or did not come up; what had started was ended.
    """
    require_core()
    with name_lock(folder.name, folder.path.parent.parent):
        if folder.phase() is not Phase.LOST:
            return False
        check_resumable(folder)
        _refuse_taken(folder.name, folder.path.parent.parent, but=folder)
        if left := reap(folder, grace_s=_GRACE_S):
            pids = ", ".join(str(process.pid) for process in left)
            raise LaunchError(f"these processes of {folder.run_id} could not be ended: {pids}")
        if folder.phase() is Phase.ENDED:
            return False
        _make_private(folder.api.parent)
        agent = spawn(folder, folder.agent_argv)
    try:
        _await_controller(folder, agent, ready, deadline_s)
    except BaseException as error:
        with deaf():
            reap(folder, grace_s=_GRACE_S)
        if isinstance(error, LaunchError):
            raise LaunchError(f"{error}\n{folder.tail()}", hint=f"the logs are in {folder.path}") from error
        raise
    return True


def reap(folder: RunFolder, *, grace_s: float) -> list[Process]:
    """End what is left of a run without its controller: the agent first, then whatever carries the run id.

    Returns:
        What could not be ended.
    """
    agent = folder.agent()
    known = [
        process
        for who in ("controller", "lighthouse", "provisioner", "door")
        if (process := folder.process(who))
    ]
    left = end(folder.run_id, first=[agent] if agent else [], grace_s=grace_s)
    for process in known:  # their environment may have been unreadable
        if process.alive:
            process.signal(signal.SIGKILL)
    return left or [process for process in carrying(folder.run_id) if process.alive]


def finish(folder: RunFolder, *, state: str, reason: str, exit_code: int) -> Mapping[str, Any]:
    """Write the final status of a run that no controller is left to write, and settle its folder.

    A final status that exists already is kept.

    Raises:
        SystemCallError: The disk takes no status; all else is done.
    """
    final = folder.final
    if final is None:
        now_ms = time.time_ns() // 1_000_000
        info = folder.info
        created_ms = folder.created_ms
        final = {
            "run_id": folder.run_id,
            "name": folder.name,
            "state": state,
            "reason": reason,
            "exit_code": exit_code,
            "infra": info.get("infra", "local"),
            "created_ms": created_ms,
            "ended_ms": now_ms,
            "elapsed_s": max(0.0, (now_ms - created_ms) / 1000) if created_ms else None,
            "run_dir": str(folder.path),
            "groups": [],
            "recoveries": [],
        }
        try:
            _write_final(folder, final)
        except OSError:
            folder.settle()  # secrets do not stay for want of a status, and what was shipped leaves room for one
            try:
                _write_final(folder, final)
            except OSError as error:
                raise SystemCallError(
                    f"{folder.run_id} is over, which cannot be written to {folder.path}: {error.strerror or error}",
                    hint=f"make room on that disk, then `sky-monarch down {folder.run_id}` once more",
                ) from error
            return final
    folder.settle()
    return final


def _write_final(folder: RunFolder, final: Mapping[str, Any]) -> None:
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        write_json(folder.path / "final.json", final)
