"""Runs of the real CLI, in a state folder of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from sky_monarch import sdk
from sky_monarch.errors import RunNotFoundError, SkyMonarchError
from sky_monarch.launch.folder import RunFolder, find
from sky_monarch.sdk.run import Run
from tests.support.processes import with_variable
from tests.support.waiting import HopelessError, eventually

ROOT = Path(__file__).resolve().parents[2]
FREE_RANK = f"{sys.executable} -m tests.support.free_rank"
ENDED = {"SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED", "LOST"}


class Workbench:
    """Starts, ends and looks at runs through the SDK, as the CLI does, with an environment of its own.

    Each command typed costs half a second of a core, most of it imports; the same through the SDK milliseconds. So
    :meth:`cli` is for what a test wants to know of the command itself. And what a test waits for must not be over
    before it is seen.

    Attributes:
        home: State folder of this workbench.
        env: Environment of every launch and every CLI call.
    """

    def __init__(self, folder: Path, *, extra_env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.home = folder / "state"
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SKY_MONARCH_", "TORCH", "MASTER_"))
        }
        self.env = {
            **inherited,
            "SKY_MONARCH_STATE_DIR": str(self.home),
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
            "NO_COLOR": "1",
            **(extra_env or {}),
        }
        self.names: list[str] = []

    def cli(self, *arguments: str, timeout_s: float = 60, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run ``sky-monarch`` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "sky_monarch", *arguments],
            env=self.env,
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            **kwargs,
        )

    def popen(self, *arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
        """Start ``sky-monarch`` and do not wait."""
        return subprocess.Popen(
            [sys.executable, "-m", "sky_monarch", *arguments],
            env=self.env,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **kwargs,
        )

    def write(self, text: str, *, name: str = "job.yaml") -> Path:
        """Write a job file."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def job(self, name: str, *, run: str, extra: str = "", replicas: int = 3, **fields: Any) -> Path:
        """Write a job file out of its usual fields; ``recovery`` is short so that tests are."""
        recovery = {
            "max_restarts": 5,
            "window_s": 60,
            "backoff_s": 0.1,
            "backoff_max_s": 1,
            "grace_s": 3,
            "standby": 0,
            **fields.pop("recovery", {}),
        }
        document = {
            "name": name,
            "replicas": replicas,
            "min_replicas": fields.pop("min_replicas", 1),
            "run": run,
            "recovery": recovery,
            **fields,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(document, indent=1) + "\n" + textwrap.dedent(extra), encoding="utf-8")
        return path

    @property
    def gate(self) -> Path:
        """The file at which :meth:`ease` ends."""
        return self.folder / "go"

    def ease(self, step: int) -> str:
        """Words for a free rank that takes its time from ``step`` on, until :attr:`gate` is there."""
        return f"--ease {step}:{self.gate}"

    @contextmanager
    def shell(self) -> Iterator[None]:
        """In this process, with the environment of :attr:`env` and nothing else."""
        with mock.patch.dict("os.environ", self.env, clear=True), quiet_sockets():
            yield

    def up(self, job: Path, *arguments: str, timeout_s: float = 60) -> str:
        """``up --detach``; returns the run's name."""
        options = _options_of(arguments)
        if options is None:
            done = self.cli("up", str(job), "--detach", *arguments, timeout_s=timeout_s)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            try:
                with self.shell(), sdk.up(job, timeout_s=timeout_s, **options):
                    pass
            except SkyMonarchError as error:
                raise AssertionError(f"{job.name} does not come up: {error}") from error
        name = job.stem
        self.names.append(name)
        return name

    def down(self, name: str, *, grace_s: float = 1.0) -> None:
        """``down NAME --grace``."""
        with self.shell(), Run(self.folder_of(name)) as run:
            run.down(grace_s=grace_s)

    def logs(self, name: str, *, replica: int | None = None) -> str:
        """The text that ``logs NAME`` shows, without the names of the ranks before each line."""
        with quiet_sockets(), Run(self.folder_of(name)) as run:
            return "\n".join(line.line for line in run.logs(replica=replica))

    def status(self, name: str) -> dict[str, Any]:
        """What ``status NAME --json`` prints."""
        with quiet_sockets(), Run(self.folder_of(name)) as run:
            return run.status().to_json()

    def events(self, name: str) -> list[dict[str, Any]]:
        """What ``events NAME --json`` prints."""
        with quiet_sockets(), Run(self.folder_of(name)) as run:
            return [event.to_json() for event in run.events()]

    def folder_of(self, name: str) -> RunFolder:
        """The run of that name; "not yet" where there is none."""
        try:
            return find(name, self.home)
        except RunNotFoundError as error:
            raise AssertionError(str(error)) from error

    def wait_for_state(self, name: str, *states: str, within_s: float = 60) -> dict[str, Any]:
        """Wait until the run is in one of ``states`` and return its status."""

        def probe() -> dict[str, Any]:
            status = self.status(name)
            if status["state"] not in states and status["state"] in ENDED:
                raise HopelessError(f"the run is {status['state']}: {status['reason']}")
            assert status["state"] in states, (status["state"], status["reason"])
            return status

        return eventually(probe, within_s=within_s, every_s=0.05)

    def wait_for_end(self, name: str, *, within_s: float = 90) -> dict[str, Any]:
        """Wait until the run has ended and return its status."""
        return self.wait_for_state(name, *ENDED, within_s=within_s)

    def wait_for_step(self, name: str, step: int, *, within_s: float = 60) -> dict[str, Any]:
        """Wait until every rank runs and some group has committed ``step``."""

        def probe() -> dict[str, Any]:
            status = self.status(name)
            if status["state"] in ENDED:
                raise HopelessError(f"the run is {status['state']}: {status['reason']}")
            assert (status["step"] or 0) >= step, status["step"]
            assert all(rank["pid"] for group in status["groups"] for rank in group["ranks"]), status["groups"]
            return status

        return eventually(probe, within_s=within_s, every_s=0.05, comes_always=True)

    def run_folder(self, name: str) -> Path:
        """Newest run folder of that name."""
        return max((self.home / "runs").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime_ns)

    def processes(self, name: str) -> dict[int, str]:
        """Live processes of that run."""
        return with_variable("SKY_MONARCH_RUN_ID", self.run_folder(name).name)

    def wait_for_first_commit(self, name: str, replica: int, generation: int) -> None:
        """Wait until that generation trains: with the others, which must not be at their end before."""
        wanted = {"event": "first_commit", "replica": replica, "generation": generation}
        eventually(
            lambda: any(wanted.items() <= event.items() for event in self.events(name)),
            within_s=60,
            every_s=0.05,
            what=f"generation {generation} of replica {replica} commits",
        )

    def pids_spawned(self, name: str, rank: int = 0) -> dict[int, list[int]]:
        """Every pid that this rank of each group has had, in order."""
        spawned: dict[int, list[int]] = {}
        for event in self.events(name):
            if event["event"] == "rank_spawned" and event["rank"] == rank:
                spawned.setdefault(event["replica"], []).append(event["pid"])
        return spawned

    def running_pid(self, name: str, replica: int, rank: int = 0) -> int:
        """Pid of a rank, once it is known: what the rank itself does is seen before that."""
        return eventually(
            lambda: pid_of(self.status(name), replica, rank), what=f"replica {replica} has a pid"
        )

    def kill_agent_for_good(self, name: str) -> None:
        """SIGKILL the head's agent and the keeper that would start it again."""
        kill_agent_for_good(self.folder_of(name))

    def close(self) -> None:
        """End every run; used by the fixture, which then checks that nothing is left."""
        for name in self.names:
            with suppress(SkyMonarchError, AssertionError):
                if self.folder_of(name).provider == "skypilot":
                    self.cli(
                        "down", name, "--grace", "1"
                    )  # SkyPilot has settings of its own in that environment
                else:
                    self.down(name)


def _options_of(arguments: tuple[str, ...]) -> dict[str, Any] | None:
    """What is typed after ``up``, as the SDK takes it; None where only the command line has such a word."""
    options: dict[str, Any] = {}
    if len(arguments) % 2:
        return None
    for option, value in zip(arguments[::2], arguments[1::2], strict=True):
        match option:
            case "--hosts" | "--spare":
                options[option.removeprefix("--")] = int(value)
            case "--inject":
                options.setdefault("inject", []).append(value)
            case _:
                return None
    return options


def kill_agent_for_good(folder: RunFolder) -> None:
    """SIGKILL the keeper of a run's agent, then the agent."""
    keeper = folder.process("agent")
    assert keeper, "no keeper runs"
    keeper.signal(signal.SIGKILL)
    eventually(lambda: not keeper.alive)
    agent = folder.agent()
    assert agent, "the agent died with its keeper"
    agent.signal(signal.SIGKILL)
    eventually(lambda: folder.agent() is None)


def pid_of(status: dict[str, Any], replica: int, rank: int = 0) -> int:
    """Pid of one rank; 0 where it has none (yet, or any more)."""
    groups = status["groups"]  # none while the run is being launched
    ranks = groups[replica]["ranks"] if replica < len(groups) else []
    return (ranks[rank]["pid"] or 0) if rank < len(ranks) else 0


def generation_of(status: dict[str, Any], replica: int) -> int:
    """Generation of one group."""
    return int(status["groups"][replica]["generation"])


@contextmanager
def quiet_sockets() -> Iterator[None]:
    """Without the warning about the socket that httpcore leaves unclosed when a connect fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@contextmanager
def ended_at_exit(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Make sure that ``process`` is gone at the end of the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
