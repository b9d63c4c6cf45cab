"""Run folders: what a run leaves on disk, and what that says about it."""

from __future__ import annotations

import contextlib
import difflib
import enum
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sky_monarch.errors import LaunchError, RunNotFoundError
from sky_monarch.launch.environment import state_dir
from sky_monarch.launch.placement import cluster_name
from sky_monarch.launch.process import Process, carrying, command_lines

__all__ = ["Phase", "RunFolder", "find", "list_runs", "name_lock", "new_run_id", "runs_dir", "write_json"]

_LOCK_WAIT_S = 10.0
_LAST_MS = 253_402_300_799_000  # the year 9999: beyond it there are no dates


class Phase(enum.Enum):
    """What a run folder and the processes it names say about a run."""

    LAUNCHING = "its launcher has not started the agent yet"
    LIVE = "its agent runs"
    ENDED = "it has a final status"
    LOST = "it has no final status, and no agent"


def runs_dir(state: Path | None = None) -> Path:
    """The folder that holds one folder a run."""
    return (state or state_dir()) / "runs"


def new_run_id(name: str, now: datetime | None = None) -> str:
    """A fresh run id: ``<name>-<yyyymmdd>-<hhmmss>-<4 hex>``."""
    moment = now or datetime.now().astimezone()
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def write_json(path: Path, value: Any, *, mode: int = 0o600, indent: int | None = 1) -> None:
    """Write a JSON file so that nobody ever sees half of it. Without an indent it costs a tenth."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=indent, ensure_ascii=False))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# What a damaged file holds is nobody's reason to fail: one bad folder must not hide all the other runs.
def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on disk.

    Attributes:
        path: The folder, ``<state>/runs/<run_id>``.
    """

    path: Path

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.path.name

    @property
    def info(self) -> dict[str, Any]:
        """``run.json``; empty where the launcher did not get that far."""
        return _read_json(self.path / "run.json") or {}

    @property
    def name(self) -> str:
        """Name of the run."""
        named = self.info.get("name")
        return named if named and isinstance(named, str) else self.run_id.rsplit("-", 3)[0]

    @property
    def created_ms(self) -> int:
        """Unix time of its creation in milliseconds."""
        created_ms = _whole(self.info, "created_ms", 0)
        return created_ms if 0 <= created_ms <= _LAST_MS else 0

    @property
    def final(self) -> dict[str, Any] | None:
        """The last status, once the run has ended."""
        return _read_json(self.path / "final.json")

    @property
    def job(self) -> dict[str, Any]:
        """The public job; empty where the launcher did not get that far."""
        return _read_json(self.path / "job.json") or {}

    @property
    def provider(self) -> str | None:
        """Who brings its hosts up: ``skypilot``, ``local`` for a rehearsal; None for a run of this machine."""
        provider = self.info.get("provider")
        return provider if isinstance(provider, str) else None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that are brought up for it; with SkyPilot the first cluster of each has its name."""
        named = self.info.get("hosts")
        return tuple(host for host in named if isinstance(host, str)) if isinstance(named, list) else ()

    def clusters(self) -> tuple[tuple[str, str, bool], ...]:
        """``(host, cluster, stands)`` of what was asked of a provider and has not been taken down, by attempt.

        What stands bills whatever else is known of its host: it has not been seen to end, or would not go.
        """
        asked = _read_json(self.path / "requests.json") or {}
        hosts, older = asked.get("hosts"), asked.get("older")
        newest = list(hosts.values()) if isinstance(hosts, dict) else []
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            return tuple(
                (one["host"], cluster_name(one["host"], one["attempt"]), old or _stands(one))
                for records, old in ((newest, False), (older or (), True))
                for one in records
            )
        return ()

    @property
    def head(self) -> str | None:
        """The cluster that its head is; None where that is this machine."""
        head = self.info.get("head")
        return head if isinstance(head, str) and head else None

    @property
    def door(self) -> Path:
        """How a head that is a cluster is reached from here (``launch.door``): there from when it was up on."""
        return self.path / "door.json"

    @property
    def head_was_lost(self) -> bool:
        """Whether its head follows one that was lost."""
        return (self.path / "succession.json").exists()

    @property
    def journal(self) -> Path:
        """The database of events."""
        return self.path / "journal.db"

    @property
    def api(self) -> Path:
        """Unix socket of the controller's API."""
        return self._sockets().get("api", self.path / "api.sock")

    @property
    def private(self) -> dict[str, Any] | None:
        """All secrets of the run; None once it was settled, or where the file is damaged."""
        return _read_json(self.path / "private.json")

    @property
    def token(self) -> str | None:
        """Secret of the run; None once it was settled."""
        token = (self.private or {}).get("token")
        return token if isinstance(token, str) else None

    @property
    def variables(self) -> list[str]:
        """Names of the variables that the job sets."""
        listed = [self.job.get(section) for section in ("envs", "secrets")]
        names = [name for names in listed if isinstance(names, list | dict) for name in names]
        return [name for name in names if isinstance(name, str) and name]

    @property
    def agent_argv(self) -> list[str]:
        """How its agent is started, with the interpreter of its first start; empty where nothing says so.

        Where its head is a cluster, that is the provisioner: the one process that it has here.
        """
        if self.head is not None:
            python = self.info.get("python")
            config = self.path / "provisioner.json"
            known = isinstance(python, str) and config.is_file()
            return [str(python), "-m", "sky_monarch.provision", str(config)] if known else []
        services = (_read_json(self.path / "agent.json") or {}).get("services")
        try:
            python = services[0]["argv"][0]  # type: ignore[index]
        except (TypeError, LookupError):
            return []
        return [str(python), "-m", "sky_monarch.agent", str(self.path / "agent.json")]

    @property
    def resumable(self) -> bool:
        """Whether all is there that its processes need to start again; the journal is not needed."""
        known = self.token is not None and bool(self.job) and bool(self.agent_argv)
        return known and (self.path / "controller.json").is_file() and (self.path / "run.json").is_file()

    def process(self, who: str) -> Process | None:
        """The running ``agent``, ``controller`` or ``lighthouse``; None where it does not run."""
        written = _read_json(self.path / f"{who}.pid")
        if not written:
            return None
        process = Process(_whole(written, "pid", 0), _whole(written, "start_ticks", -1))
        return process if process.alive else None

    def launcher(self) -> Process | None:
        """The launching process while it runs."""
        info = self.info
        process = Process(_whole(info, "launcher_pid", 0), _whole(info, "launcher_start_ticks", -1))
        return process if process.alive else None

    @property
    def supervisor(self) -> str:
        """Which process of it the launcher starts: ``agent``, or ``provisioner`` where its head is a cluster."""
        return "agent" if self.head is None else "provisioner"

    def agent(self) -> Process | None:
        """The running agent: its keeper, which is the process that the launcher wrote down.

        Where the launcher died before it could, or the keeper was killed, whichever of the two is found. Where its
        head is a cluster, the provisioner and its keeper.
        """
        if known := self.process(self.supervisor):
            return known
        return next(filter(self._is_agent, carrying(self.run_id)), None)

    def _is_agent(self, process: Process) -> bool:
        """Whether it is the head's agent: those of hosts that are on this machine carry the run's mark, too."""
        arguments = process.arguments()
        module = "sky_monarch.agent" if self.head is None else "sky_monarch.provision"
        return module in arguments and Path(arguments[-1]).parent.name == self.run_id

    def phase(self) -> Phase:
        """What the files and processes say now."""
        if (self.path / "final.json").exists():
            return Phase.ENDED
        if not (self.path / "run.json").exists():  # the first file to come: somebody removed it
            return Phase.LOST
        # Looked for first: it writes down what it has started, and may be gone, before we have looked for that.
        launching = not (self.path / f"{self.supervisor}.pid").exists() and self.launcher() is not None
        if self.head is not None:
            if self.door.exists():  # whether or not anything of it runs here: the head may be asked
                return Phase.LIVE
            if self.agent():
                return Phase.LAUNCHING
        elif self.agent():
            return Phase.LIVE
        if launching:
            return Phase.LAUNCHING
        # The agent may have ended, after the controller wrote the end, between the two looks.
        return Phase.ENDED if (self.path / "final.json").exists() else Phase.LOST

    def holder(self) -> str | None:
        """Who keeps the name of this run taken, in words; None where nobody does."""
        phase = self.phase()
        moment = datetime.fromtimestamp(self.created_ms / 1000).astimezone()
        since = moment.strftime("%Y-%m-%d %H:%M:%S") if self.created_ms else "an unknown time"
        if phase is Phase.LIVE and self.head is not None:
            return f"its head is the cluster {self.head}, since {since}"
        if phase is Phase.LIVE and (agent := self.agent()):
            return f"agent pid {agent.pid}, since {since}"
        if phase is Phase.LAUNCHING:
            return f"being launched by pid {self.info.get('launcher_pid')}, since {since}"
        if phase is Phase.LOST and (left := carrying(self.run_id)):
            what = "run folder removed" if (agent := self.agent()) else "agent dead"
            pid = (agent or left[0]).pid
            count = "1 process is" if len(left) == 1 else f"{len(left)} processes are"
            return f"{what}, but {count} left, such as pid {pid}, since {since}"
        return None

    def tail(self, *, lines: int = 15) -> str:
        """Last lines of the logs of its own processes, each under its name."""
        parts = []
        for who in ("agent", "controller", "lighthouse", "provisioner"):
            with contextlib.suppress(OSError):
                with (self.path / f"{who}.log").open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                    text = file.read().decode(errors="replace").splitlines()[-lines:]
                if text:
                    parts.append("\n".join([f"{who}.log:", *(f"  {line}" for line in text)]))
        return "\n".join(parts)

    def settle(self, *, keep: bool = True) -> None:
        """Remove what an ended run no longer needs: secrets, sockets, what was shipped. Safe to repeat.

        Args:
            keep: First make the excerpt that a later ``debug-bundle`` shows: without the values of the secrets,
                nobody could take them out of it.
        """
        if keep:
            from sky_monarch.launch import excerpt

            excerpt.keep(self)
        hosts = [  # those that were processes of this machine
            path for what in ("private.json", "*.sock") for path in self.path.glob(f"hosts/*/{what}")
        ]
        door = (self.door, self.path / "door.lock", self.path / "door.pid")
        for leftover in (self.path / "private.json", *hosts, *door, *self._sockets().values()):
            with contextlib.suppress(OSError):
                leftover.unlink()
        shutil.rmtree(self.path / "ship", ignore_errors=True)
        with contextlib.suppress(OSError):
            outside = self.api.parent
            if outside != self.path and outside.name.startswith("sky-monarch-"):
                outside.rmdir()

    def _sockets(self) -> dict[str, Path]:
        sockets = self.info.get("sockets")
        named = sockets.items() if isinstance(sockets, dict) else ()
        return {who: Path(path) for who, path in named if path and isinstance(path, str)}

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        self.settle(keep=False)
        shutil.rmtree(self.path, ignore_errors=True)


def _stands(record: dict[str, Any]) -> bool:
    """Whether the cluster of the newest attempt at a host is there, as far as whoever asked for it knows."""
    launching = record.get("phase") == "launching" and record.get("choice") is not None
    return launching or record.get("phase") == "up" or bool(record.get("left"))


def _folders(root: Path) -> list[RunFolder]:
    try:
        return [RunFolder(path) for path in root.iterdir() if (path / "run.json").is_file()]
    except OSError:
        return []


def _bereft(root: Path, known: set[str]) -> list[RunFolder]:
    """Runs whose agent lives on although their folder was removed: they can still be named and ended."""
    mark = f"{root}{os.sep}"
    found = set()
    for arguments in command_lines("sky_monarch.agent"):
        run_id, _, file = arguments[-1].removeprefix(mark).partition(os.sep)
        if arguments[-1].startswith(mark) and file == "agent.json" and run_id not in known:
            found.add(run_id)
    return [RunFolder(root / run_id) for run_id in found]


def list_runs(state: Path | None = None) -> list[RunFolder]:
    """All runs, oldest first."""
    root = runs_dir(state)
    folders = _folders(root)
    folders += _bereft(root, {folder.run_id for folder in folders})
    return sorted(folders, key=lambda folder: (folder.created_ms, folder.run_id))


def find(name_or_id: str, state: Path | None = None) -> RunFolder:
    """The run of this id, else the live run of this name, else its newest ended one.

    Raises:
        RunNotFoundError: There is none.
    """
    runs = list_runs(state)
    if exact := [folder for folder in runs if folder.run_id == name_or_id]:
        return exact[0]
    named = [folder for folder in runs if folder.name == name_or_id]
    live = [folder for folder in named if folder.phase() in (Phase.LIVE, Phase.LAUNCHING)]
    if named:
        return (live or named)[-1]
    known = sorted({folder.name for folder in runs})
    near = difflib.get_close_matches(name_or_id, known, n=1)
    hint = (
        f"did you mean {near[0]!r}?" if near else "`sky-monarch status --all` lists the runs of this machine"
    )
    raise RunNotFoundError(f"no run is named {name_or_id!r}", hint=hint)


@contextlib.contextmanager
def name_lock(name: str, state: Path) -> Iterator[None]:
    """Held while a name is checked and taken, so that of two launches at the same instant one wins.

    Raises:
        LaunchError: Somebody held it for ten seconds: the work under it takes milliseconds.
    """
    folder = state / "names"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another launch has held the name {name!r} for {_LOCK_WAIT_S:.0f} s"
                    raise LaunchError(message, hint=f"see who: fuser -v {folder / f'{name}.lock'}") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)
