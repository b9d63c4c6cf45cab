"""Reads ``controller.json`` and what it names, and checks all of it before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sky_monarch.controller.money import Budget
from sky_monarch.controller.spans import places_of
from sky_monarch.errors import ConfigError

__all__ = ["Settings", "load_settings"]

_LIMITS = frozenset(
    {
        "agent_doubted_s",
        "agent_lost_s",
        "agent_joins_s",
        "host_backoff_s",
        "host_backoff_max_s",
        "linger_s",
        "probe_s",
        "reap_s",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a controller process is told.

    Attributes:
        run_id: The run.
        run_dir: Its folder.
        name: Name of the run.
        infra: Where it runs.
        created_ms: When it was launched, Unix time in milliseconds.
        token: Secret of the run; never shown.
        base_env: The environment of the shell that launched it.
        envs: The job's own variables.
        secrets: The job's secret variables.
        job: The public JobSpec as JSON values.
        api: Path of the API's unix socket.
        channel: Address that agents dial.
        lighthouse_kind: ``sky-monarch`` or ``torchft``.
        lighthouse_address: ``host:port``.
        lighthouse_control: Address of the lighthouse's control channel; None for TorchFT's.
        lighthouse_supervised: The same on this machine, where no certificate is asked for; None for TorchFT's.
        injections: Faults to rehearse, as protocol values.
        hosts: Replicas by host; None: all of them on ``local``.
        limits: Bounds of waits that no job sets, in place of those of :class:`model.Limits`.
        tls: Whether hosts reach controller and lighthouse over TLS, wherever they are.
        identity: The controller's certificate; None where it is on a unix socket alone.
        listener_fd: A listening TCP socket that the agent has passed on; TLS is spoken there.
        provisioned: Hosts that a launcher makes.
        choices: How many places the job may run in.
        budget: What the job may cost.
        authority: Of the run, as ``Authority.to_json`` kept it; None where agents show no certificates.
        reached_at: Where hosts dial this controller.
        relay: Where they dial the relay, through which alone they reach each other; None without a tunnel.
        version: Of the sky-monarch that launched the run.
        collect_s: How long the end of the run is kept for whoever launched it; 0: that is this machine.
        per_host: Replica groups that one host has GPUs for, where no plan lies beside; 0: that is not known.
        succeeds: What is known of the run under a head that is lost, and which this one follows; None for the first.
    """

    run_id: str
    run_dir: Path
    name: str
    infra: str
    created_ms: int
    token: str = field(repr=False)
    base_env: Mapping[str, str] = field(repr=False)
    envs: Mapping[str, str] = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    job: Mapping[str, Any]
    api: Path
    channel: str
    lighthouse_kind: str
    lighthouse_address: str
    lighthouse_control: str | None
    injections: tuple[Mapping[str, Any], ...]
    hosts: Mapping[str, tuple[int, ...]]
    lighthouse_supervised: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    tls: bool = False
    identity: Mapping[str, str] | None = field(default=None, repr=False)
    listener_fd: int | None = None
    provisioned: frozenset[str] = frozenset()
    choices: int = 1
    budget: Budget = field(default_factory=Budget)
    authority: Mapping[str, Any] | None = field(default=None, repr=False)
    reached_at: str = ""
    relay: str | None = None
    version: str = ""
    collect_s: float = 0.0
    per_host: int = 0
    succeeds: Mapping[str, Any] | None = None


def load_settings(path: Path, environ: Mapping[str, str]) -> Settings:
    """Read ``controller.json`` and the files it names.

    Args:
        path: The file.
        environ: Holds ``SKY_MONARCH_LIGHTHOUSE_ADDR``; with ``tls`` also ``SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR``,
            ``SKY_MONARCH_CONTROLLER_ADDR`` and ``SKY_MONARCH_LISTEN_FD``.

    Raises:
        ConfigError: Something is missing or of the wrong kind; says what and where.
    """
    config = _read(path)
    run_dir = Path(_text(config, "run_dir", path))
    named = config.get("sockets")
    sockets: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
    private_path = Path(_text(config, "private", path))
    private = _read(private_path)
    job_path = Path(_text(config, "job", path))
    job = _read(job_path)
    run_path = run_dir / "run.json"
    run = _read(run_path)
    wanted = config.get("lighthouse_kind")
    kind = wanted.get("kind") if isinstance(wanted, Mapping) else wanted
    if kind not in ("sky-monarch", "torchft"):
        raise ConfigError(f"{path}: lighthouse_kind is {kind!r}, not sky-monarch or torchft")
    address = environ.get("SKY_MONARCH_LIGHTHOUSE_ADDR", "")
    if ":" not in address:
        raise ConfigError(
            f"SKY_MONARCH_LIGHTHOUSE_ADDR is {address!r}, not host:port",
            hint="the agent sets it; the controller is not started by hand",
        )
    tls = config.get("tls", False)
    if not isinstance(tls, bool):
        raise ConfigError(f"{path}: tls is {tls!r}, not true or false")
    control = config.get("lighthouse_control")
    if control is None and tls and kind == "sky-monarch":
        control = f"tls:{_passed(environ, 'SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR')}"
    if control is None and kind == "sky-monarch" and sockets.get("lighthouse"):
        control = f"unix:{sockets['lighthouse']}"
    near = f"unix:{sockets['lighthouse']}" if sockets.get("lighthouse") else None
    api = config.get("api") or sockets.get("api")
    channel = config.get("channel") or (f"unix:{sockets['controller']}" if "controller" in sockets else None)
    if not isinstance(api, str) or not isinstance(channel, str):
        raise ConfigError(f"{path} names no sockets")
    return Settings(
        run_id=_text(config, "run_id", path),
        run_dir=run_dir,
        name=str(run.get("name") or job.get("name")),
        infra=str(run.get("infra") or "local"),
        created_ms=_whole(run, "created_ms", run_path),
        token=_text(private, "token", private_path),
        base_env=_texts(private, "base_env", private_path),
        envs=_texts(private, "envs", private_path),
        secrets=_texts(private, "secrets", private_path),
        job=job,
        api=Path(api),
        channel=channel,
        lighthouse_kind=kind,
        lighthouse_address=address,
        lighthouse_control=control if kind == "sky-monarch" else None,
        lighthouse_supervised=near if kind == "sky-monarch" else None,
        injections=tuple(config.get("injections") or ()),
        hosts=_hosts(config, job, path, job_path),
        limits=_limits(config, path),
        tls=tls,
        identity=_identity(private, private_path) if tls else None,
        listener_fd=_descriptor(environ) if tls else None,
        provisioned=_provisioned(config, path),
        choices=_whole({"choices": config.get("choices", 1)}, "choices", path),
        budget=_budget(config.get("budget") or job.get("budget"), path),
        authority=_authority(private, private_path),
        reached_at=_reached_at(environ, channel),
        relay=_relay(config, environ, path),
        version=str(run.get("version") or ""),
        collect_s=_collect_s(config, path),
        per_host=_whole({"per_host": config.get("per_host", 0)}, "per_host", path),
        succeeds=_succeeds(config, path),
    )


def _succeeds(config: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    told = config.get("succeeds")
    if told is None:
        return None
    needed = {"attempt", "reason", "step", "after", "hosts", "generations", "homes", "replicas", "spent"}
    if not isinstance(told, Mapping) or not needed <= told.keys():
        raise ConfigError(f"{path}: succeeds has not all of {', '.join(sorted(needed))}")
    return told


def _collect_s(config: Mapping[str, Any], path: Path) -> float:
    seconds = config.get("collect_s", 0.0)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise ConfigError(f"{path}: collect_s is {seconds!r}, not a number of seconds")
    return float(seconds)


def _passed(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(
            f"{name} is not set", hint="with `tls` the agent passes it on: see `listen` in agent.json"
        )
    return value


def _descriptor(environ: Mapping[str, str]) -> int:
    name = "SKY_MONARCH_LISTEN_FD"
    number = _passed(environ, name)
    if not number.isdecimal():
        raise ConfigError(f"{name} is {number!r}, no number of a descriptor")
    return int(number)


def _identity(private: Mapping[str, Any], path: Path) -> dict[str, str]:
    identities = private.get("identities")
    identity = identities.get("controller") if isinstance(identities, Mapping) else None
    names = {"name", "ca_pem", "cert_pem", "key_pem"}
    if not isinstance(identity, Mapping) or not names <= identity.keys():
        raise ConfigError(f"{path}: there is no certificate in identities.controller")
    return {name: str(identity[name]) for name in names}


def _provisioned(config: Mapping[str, Any], path: Path) -> frozenset[str]:
    """Hosts that a launcher makes; whoever lists hosts without a word on that has made them himself."""
    found = set()
    for host in config.get("hosts") or ():
        wanted = host.get("provisioned", False)
        if not isinstance(wanted, bool):
            raise ConfigError(f"{path}: provisioned of host {host['name']} is {wanted!r}, not true or false")
        found |= {str(host["name"])} if wanted else set()
    return frozenset(found)


def _budget(value: object, path: Path) -> Budget:
    if value is None:
        return Budget()
    if not isinstance(value, Mapping) or not value.keys() <= {"max_usd", "max_hours"}:
        raise ConfigError(f"{path}: budget is not a map of max_usd and max_hours")
    limits = {name: limit for name, limit in value.items() if limit not in (None, "off")}
    for name, limit in limits.items():
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
            raise ConfigError(f"{path}: budget.{name} is {limit!r}, not a number above 0")
    return Budget(**limits)


def _authority(private: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    authority = private.get("authority")
    if authority is not None and not isinstance(authority, Mapping):
        raise ConfigError(f"{path}: authority is not a map")
    return authority


def _reached_at(environ: Mapping[str, str], channel: str) -> str:
    """Where hosts dial: the port that the agent has bound for it, else the socket of this machine."""
    address = environ.get("SKY_MONARCH_CONTROLLER_ADDR", "")
    return f"tls:{address}" if address else channel


def _relay(config: Mapping[str, Any], environ: Mapping[str, str], path: Path) -> str | None:
    wanted = config.get("tunnel", False)
    if not isinstance(wanted, bool):
        raise ConfigError(f"{path}: tunnel is {wanted!r}, not true or false")
    return f"tls:{_passed(environ, 'SKY_MONARCH_RELAY_ADDR')}" if wanted else None


def _limits(config: Mapping[str, Any], path: Path) -> dict[str, float]:
    limits = config.get("limits") or {}
    if not isinstance(limits, Mapping) or not limits.keys() <= _LIMITS:
        raise ConfigError(f"{path}: limits is not a map of some of {', '.join(sorted(_LIMITS))}")
    for name, limit_s in limits.items():
        if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or limit_s <= 0:
            raise ConfigError(f"{path}: limits.{name} is {limit_s!r}, not a number of seconds")
    return {name: float(limit_s) for name, limit_s in limits.items()}


def _hosts(
    config: Mapping[str, Any], job: Mapping[str, Any], path: Path, job_path: Path
) -> dict[str, tuple[int, ...]]:
    count = _whole(job, "replicas", job_path)
    listed = config.get("hosts")
    if listed is None:
        return {str(config.get("host") or "local"): tuple(range(count))}
    try:
        hosts = {str(host["name"]): tuple(int(replica) for replica in host["groups"]) for host in listed}
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: hosts is not a list of {{name, groups}}") from error
    placed = sorted({replica for replicas in hosts.values() for replica in replicas})
    if placed != list(range(count)):
        raise ConfigError(f"{path}: hosts place {placed}, the job has the replicas 0 to {count - 1}")
    try:
        parts = places_of(hosts, ranks=_whole({"ranks": job.get("ranks_per_replica", 1)}, "ranks", job_path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not parts.keys() <= _provisioned(config, path):
        raise ConfigError(f"{path}: only hosts that are provisioned can share a replica group")
    return hosts


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON") from error  # never show it: it may hold secrets
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _text(config: Mapping[str, Any], key: str, path: Path) -> str:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: {key} is missing or not a text")
    return value


def _whole(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{path}: {key} is missing or not a whole number")
    return value


def _texts(config: Mapping[str, Any], key: str, path: Path) -> dict[str, str]:
    value = config.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigError(f"{path}: {key} is not a map of texts")
    return value
