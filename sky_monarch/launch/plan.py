"""What a local run consists of: files, sockets, services. Pure: reads nothing, writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sky_monarch.config.command import rank_command
from sky_monarch.config.examination import examination, needs_of

__all__ = ["LocalPlan", "plan_local"]

_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes on Linux, 104 on macOS; some room for suffixes
_SHORT_TEMPORARY = Path("/tmp")  # noqa: S108  (where TMPDIR is as long; the folder in it is random and 0700)
_LINGER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """Everything that a local launch writes and starts.

    Attributes:
        name: Name of the run.
        run_id: Its id.
        state: State folder.
        run_dir: Folder of the run.
        socket_dir: Where its sockets go; the run folder, unless their paths would be too long there.
        run_json: Content of ``run.json``, without what only the launching process knows.
        files: Content of the other JSON files by name, in the order in which they are written.
        agent_argv: Command line of the head agent; where the head is a cluster, of the provisioner.
    """

    name: str
    run_id: str
    state: Path
    run_dir: Path
    socket_dir: Path
    run_json: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    agent_argv: Sequence[str]


def _has_room(folder: Path) -> bool:
    return len(os.fsencode(folder / "controller.sock")) <= _SOCKET_PATH_LIMIT


def _store_helper(job: Mapping[str, Any], base_env: Mapping[str, str], python: str) -> dict[str, Any]:
    """How the lighthouse starts the helper that serves a store for each quorum.

    It needs torch, which the interpreter of a job that starts Python outright has, and that of sky-monarch
    may have. A ``PATH`` among the job's variables does not count: their values stand in ``private.json`` alone.
    """
    command = rank_command(str(job.get("run", "")))
    word = command["argv"][0] if command["kind"] == "exec" else ""
    if re.fullmatch(r"python[0-9.]*", word.rpartition("/")[2]):
        python = str(Path(job.get("workdir", "/"), word)) if "/" in word else word
    return {
        "store_argv": [python, "-m", "sky_monarch.training.store"],
        "store_path": base_env.get("PATH", os.defpath),
    }


def plan_local(
    job: Mapping[str, Any],
    private: Mapping[str, Mapping[str, str]],
    *,
    run_id: str,
    state: Path,
    temporary: Path,
    python: str,
    version: str,
    token: str,
    base_env: Mapping[str, str],
    injections: Sequence[Mapping[str, Any]] = (),
    host: str = "local",
    run_dir: Path | None = None,
) -> LocalPlan:
    """Plan a run on this machine.

    Args:
        job: The public JobSpec as JSON values: of ``envs`` and ``secrets`` the names only, paths absolute.
        private: The values of ``envs`` and ``secrets``.
        run_id: Id of the run.
        state: State folder.
        temporary: Folder for sockets where the state folder's path is too long.
        python: Interpreter for agent, controller and lighthouse.
        version: Version of sky-monarch.
        token: Fresh secret of the run.
        base_env: What ranks inherit beneath the job's own variables.
        injections: Faults to rehearse, as protocol values.
        host: Name of the one host.
        run_dir: Folder of the run; by default that of its id among the others in ``state``.
    """
    # The name is random, and no part of the token: anybody may read it. A run and its head may be on one machine.
    seed = token if run_dir is None else f"{token} {run_dir}"
    outside = f"sky-monarch-{sha256(seed.encode()).hexdigest()[:16]}"
    run_dir = run_dir or state / "runs" / run_id
    places = (run_dir, temporary / outside)
    socket_dir = next(filter(_has_room, places), _SHORT_TEMPORARY / outside)
    sockets = {who: str(socket_dir / f"{who}.sock") for who in ("api", "controller", "agent", "lighthouse")}
    private_path = str(run_dir / "private.json")
    common = {"run_id": run_id, "run_dir": str(run_dir), "private": private_path, "sockets": sockets}
    lighthouse = dict(job.get("lighthouse") or {})
    kind = lighthouse.setdefault("kind", "sky-monarch")

    def service(name: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "argv": [python, "-m", f"sky_monarch.{name}", str(run_dir / f"{name}.json")],
            "env": {},
            "log": str(run_dir / f"{name}.log"),
            "pid_file": str(run_dir / f"{name}.pid"),
            "listen": None,
            "listen_env": None,
            **more,
        }

    agent = {
        "run_id": run_id,
        "host": host,
        "run_dir": str(run_dir),
        "private": private_path,
        "socket": sockets["agent"],
        "controller": f"unix:{sockets['controller']}",
        "services": [
            service(
                "lighthouse",
                listen="127.0.0.1:0",
                listen_env="reserve" if kind == "torchft" else None,
                spare=kind != "torchft",
            ),
            service("controller"),
        ],
        "linger_s": _LINGER_S,
    }
    # A head without groups of its own trains nothing.
    doctor = None
    if host == "local":
        need = needs_of(job, {host: range(job["replicas"])}).get(host)
        doctor = examination(job, place=host, held=False, need=need)
    if doctor is not None:
        agent["doctor"] = {**doctor, "argv": [python, *doctor["argv"]]}
    return LocalPlan(
        name=str(job["name"]),
        run_id=run_id,
        state=state,
        run_dir=run_dir,
        socket_dir=socket_dir,
        run_json={
            "run_id": run_id,
            "name": job["name"],
            "infra": "local",
            "version": version,
            "sockets": sockets,
        },
        files={
            "job.json": dict(job),
            "private.json": {
                "token": token,
                "base_env": dict(base_env),
                "envs": dict(private.get("envs", {})),
                "secrets": dict(private.get("secrets", {})),
            },
            "lighthouse.json": {
                **common,
                **lighthouse,
                **(_store_helper(job, base_env, python) if job["replicas"] > 1 else {}),
                "replicas": job["replicas"],
                "min_replicas": job.get("min_replicas", 1),
            },
            "controller.json": {
                **common,
                "job": str(run_dir / "job.json"),
                "host": host,
                "lighthouse_kind": kind,
                "injections": [dict(injection) for injection in injections],
            },
            "agent.json": agent,
        },
        agent_argv=[python, "-m", "sky_monarch.agent", str(run_dir / "agent.json")],
    )
