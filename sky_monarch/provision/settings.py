"""Reads ``provisioner.json`` and what it names, and checks all of it before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.head import Away

__all__ = ["Limits", "Settings", "load_settings"]

_PROVIDERS = ("local", "skypilot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of waits and numbers.

    Attributes:
        launches: Launches under way at a time. An API server of SkyPilot runs a few of them, and queues the rest.
        launch_s: Longest launch of one host.
        retries: Attempts at a launch that fails by an error on the way, before that counts.
        hold_s: How long it counts for other hosts, too, that all choices have failed.
        backoff_s: First delay between two attempts, doubled each time.
        backoff_max_s: Longest.
        status_s: Between two questions for the status of hosts that are up.
        early_s: Between the first two questions out of turn for a host whose agent is silent; it doubles.
        early_asks: How many of them there are.
        confirm_s: Before an answer that a host is gone is asked for once more: one proves nothing.
        notices_s: Between two looks at what a provider says unasked.
        wait_s: Of one question to the controller.
        down_s: Longest for a host to be taken down, before that is reported as failed.
        down_again_s: Before that is tried again.
        head_s: For a head that is up to answer for the first time.
        output_s: For what ranks printed to be brought here from a head that is about to go.
        unreached_s: For a head to take the order to end, before the run is ended without it.
        end_s: For a head to end its run in order, beyond the grace time.
        head_again_s: Before a head that follows a lost one, and could not be had, is tried again; it doubles.
        head_again_max_s: Longest such wait.
        head_within_s: How long that goes on.
    """

    launches: int = 8
    launch_s: float = 3600.0
    retries: int = 3
    hold_s: float = 10.0
    backoff_s: float = 2.0
    backoff_max_s: float = 60.0
    status_s: float = 20.0
    early_s: float = 3.0
    early_asks: int = 4
    confirm_s: float = 10.0
    notices_s: float = 0.25
    wait_s: float = 10.0
    down_s: float = 540.0
    down_again_s: float = 60.0
    head_s: float = 900.0
    output_s: float = 300.0
    unreached_s: float = 20.0
    end_s: float = 720.0
    head_again_s: float = 30.0
    head_again_max_s: float = 600.0
    head_within_s: float = 21_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a provisioner is told.

    Attributes:
        run_id: The run.
        run_dir: Its folder.
        provider: ``local`` or ``skypilot``.
        api: Path of the controller's unix socket.
        token: Secret of the run; never shown.
        shell_env: The environment of the shell that launched the run: credentials of clouds may be in it.
        workdir: The job's working folder on this machine.
        same_zone: Whether hosts follow the first one to its zone.
        choices: Candidates in order, :meth:`Choice.to_json` each.
        autodown_minutes: A cluster on which nothing runs for so long ends itself; None: as its task says.
        limits: Bounds.
        head: The head, where that is a cluster; None where it is this machine.
        checkpoint: Where the job saves; None where it saves nothing.
    """

    run_id: str
    run_dir: Path
    provider: str
    api: Path
    token: str = field(repr=False)
    shell_env: Mapping[str, str] = field(repr=False, default_factory=dict)
    workdir: Path | None = None
    same_zone: bool = True
    choices: tuple[Mapping[str, Any], ...] = ()
    autodown_minutes: int | None = None
    limits: Limits = field(default_factory=Limits)
    head: Away | None = None
    checkpoint: str | None = None


def load_settings(path: Path) -> Settings:
    """Read ``provisioner.json`` and the files it names.

    Raises:
        ConfigError: Something is missing or of the wrong kind; says what and where.
    """
    config = _read(path)
    private_path = Path(_text(config, "private", path))
    private = _read(private_path)
    job = config.get("job")
    if isinstance(job, str):
        job = _read(Path(job))
    elif not isinstance(job, Mapping):
        raise ConfigError(f"{path}: job is {job!r}, neither a path nor the job")
    provider = config.get("provider")
    if provider not in _PROVIDERS:
        raise ConfigError(f"{path}: provider is {provider!r}, not one of {', '.join(_PROVIDERS)}")
    sockets = config.get("sockets")
    if not isinstance(sockets, Mapping) or not isinstance(sockets.get("api"), str):
        raise ConfigError(f"{path} names no socket of the controller's API")
    choices = config.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(one, Mapping) for one in choices):
        raise ConfigError(f"{path}: choices is no list of at least one choice")
    autodown = config.get("autodown_minutes")
    if autodown is not None and (not isinstance(autodown, int) or isinstance(autodown, bool) or autodown < 1):
        raise ConfigError(f"{path}: autodown_minutes is {autodown!r}, not a positive whole number")
    shell_env = private.get("shell_env")
    workdir = job.get("workdir")
    return Settings(
        run_id=_text(config, "run_id", path),
        run_dir=Path(_text(config, "run_dir", path)),
        provider=provider,
        api=Path(sockets["api"]),
        token=_text(private, "token", private_path),
        shell_env=dict(shell_env) if isinstance(shell_env, Mapping) else {},
        workdir=Path(workdir) if isinstance(workdir, str) else None,
        same_zone=job.get("placement", "same-zone") == "same-zone",
        choices=tuple(choices),
        autodown_minutes=autodown,
        limits=_limits(config, path),
        head=_head(config, private, path),
        checkpoint=_checkpoint(job),
    )


def _checkpoint(job: Mapping[str, Any]) -> str | None:
    kept = job.get("checkpoint")
    to = kept.get("to") if isinstance(kept, Mapping) else None
    return to if isinstance(to, str) else None


def _head(config: Mapping[str, Any], private: Mapping[str, Any], path: Path) -> Away | None:
    head = config.get("head")
    if head is None:
        return None
    run = _read(path.with_name("run.json"))
    try:
        told = {**head["told"], "head": {**head["told"]["head"], "created_ms": int(run["created_ms"])}}
        secret = {key: private[key] for key in ("token", "envs", "secrets", "authority", "identities")}
        return Away(cluster=str(head["cluster"]), told=told, secret=secret)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: head makes no sense ({type(error).__name__})") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def _text(values: Mapping[str, Any], key: str, path: Path) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: {key} is missing")  # never its value: it may be a secret
    return value


def _limits(config: Mapping[str, Any], path: Path) -> Limits:
    given = config.get("limits") or {}
    known = {one.name: one.type for one in fields(Limits)}
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if name not in known or not number:
            raise ConfigError(f"{path}: limits.{name} is {value!r}")
    return Limits(**{name: int(value) if known[name] == "int" else value for name, value in given.items()})
