"""A run's head: a local run without groups of its own, whose lighthouse and controller hosts reach over TLS. Pure.

It is this machine, or a cluster that this machine launches. A cluster is told what it is to be (``told``) in one
variable and its secrets in another, and plans itself from them, with the paths and the address that it has there.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError
from sky_monarch.launch.plan import LocalPlan, plan_local
from sky_monarch.launch.tunnel import HEAD_ADDRESS

__all__ = ["COLLECT_S", "HEAD", "Away", "following", "head_files", "plan_head", "with_relay"]

HEAD = "head"
"""Name of the head among the hosts."""

COLLECT_S = 12 * 3600.0
"""How long a head that is a cluster keeps the end of its run for whoever launched it: a night."""

_MOST_BYTES = 100_000  # of one variable Linux takes 128 KiB, name and all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """What a head that is a cluster is to be.

    Attributes:
        cluster: Its name.
        told: What ``SKY_MONARCH_HOST`` holds there. No secret.
        secret: What ``SKY_MONARCH_ENROLMENT`` holds there, before it is encoded: all of its ``private.json``.
    """

    cluster: str
    told: Mapping[str, Any]
    secret: Mapping[str, Any] = dataclasses.field(repr=False)

    def enrolment(self) -> str:
        """The secret as it travels."""
        return base64.b64encode(json.dumps(self.secret, separators=(",", ":")).encode()).decode()

    def check(self) -> None:
        """Refuse what no variable of a process holds.

        Raises:
            ConfigError: It is too large.
        """
        for what, size in (
            ("the job (setup and run)", len(json.dumps(self.told))),
            ("envs and secrets", len(self.enrolment())),
        ):
            if size > _MOST_BYTES:
                raise ConfigError(
                    f"head: cluster: {what} would reach {self.cluster} as {size} bytes, "
                    f"and {_MOST_BYTES} are taken there",
                    hint="keep long values in files of the working folder, or write head: here",
                )


def following(away: Away, told: Mapping[str, Any]) -> Away:
    """A head like one that is lost, which goes on with its run.

    Args:
        away: What the first one was to be.
        told: What its controller has to know of the run (``provision.succession``). No secret.
    """
    # Which faults were carried out is known on hosts that are gone: none is carried out twice.
    head = {**away.told["head"], "succeeds": dict(told), "injections": []}
    return dataclasses.replace(away, told={**away.told, "head": head})


def head_files(
    local: LocalPlan,
    *,
    hosts: Sequence[Mapping[str, Any]],
    choices: int,
    address: str,
    tunnelled: bool = False,
) -> dict[str, Any]:
    """The files of a local run as those of a head.

    Args:
        local: The run, whose only host is called :data:`HEAD`.
        hosts: ``{name, groups}`` of each host that is brought up for it.
        choices: How many places the job may run in.
        address: Where hosts dial it.
        tunnelled: Whether hosts reach each other through it alone.
    """
    files = dict(local.files)
    placed = [{"name": HEAD, "groups": [], "provisioned": False}]
    placed += [{"name": host["name"], "groups": list(host["groups"]), "provisioned": True} for host in hosts]
    files["lighthouse.json"] = _lighthouse(files["lighthouse.json"], address)
    more = {"host": HEAD, "hosts": placed, "tls": True, "choices": choices}
    files["controller.json"] = {**files["controller.json"], **more}
    files["agent.json"] = _agent(files["agent.json"], address)
    if tunnelled:
        files |= with_relay(local, files, address)
    return files


def plan_head(
    told: Mapping[str, Any],
    secret: Mapping[str, Any],
    *,
    run_dir: Path,
    temporary: Path,
    python: str,
    path: str,
    address: str,
) -> LocalPlan:
    """Plan a head where it is.

    Args:
        told: :attr:`Away.told`.
        secret: :attr:`Away.secret`.
        run_dir: Where its files go.
        temporary: For sockets, where paths in ``run_dir`` are too long.
        python: Interpreter of its services.
        path: ``PATH`` there, for the job's own interpreter.
        address: Where hosts dial it.

    Raises:
        ConfigError: Something is missing or of the wrong kind. Shows nothing of the secret.
    """
    try:
        run = told["head"]
        local = plan_local(
            run["job"],
            {name: secret[name] for name in ("envs", "secrets")},
            run_id=str(told["run_id"]),
            state=run_dir.parent,
            temporary=temporary,
            python=python,
            version=str(told["version"]),
            token=str(secret["token"]),
            base_env={"PATH": path},
            injections=run["injections"],
            host=HEAD,
            run_dir=run_dir,
        )
        files = head_files(local, hosts=run["hosts"], choices=int(run["choices"]), address=address)
        files["controller.json"]["collect_s"] = float(run["collect_s"])
        files["controller.json"]["per_host"] = int(run["per_host"])
        if (succeeds := run.get("succeeds")) is not None:
            files["controller.json"]["succeeds"] = succeeds
        run_json = {**local.run_json, "infra": run["infra"], "created_ms": int(run["created_ms"])}
    except (LookupError, TypeError, ValueError) as error:
        what = type(error).__name__  # its words could repeat a value
        raise ConfigError(f"what this head was told makes no sense ({what})") from None
    # What was exported here is not the job's: hosts have their own.
    files["private.json"] = {**secret, "base_env": {}}
    return dataclasses.replace(local, files=files, run_json=run_json)


def _any_port(address: str) -> str:
    return f"[{address}]:0" if ":" in address else f"{address}:0"


def _lighthouse(config: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Hosts reach its port, the control channel and the stores; the head's own go on using the unix socket."""
    return {
        **config,
        "tls": True,
        "control": [f"unix:{config['sockets']['lighthouse']}", f"tls:{_any_port(address)}"],
        "address": address,
    }


def with_relay(local: LocalPlan, files: Mapping[str, Any], address: str) -> dict[str, Any]:
    """What of a head's files is different where hosts reach each other through it alone.

    A service more, and rendezvous stores that nobody reaches but through that. Its certificate is
    ``identities.relay`` of ``private.json``.

    Args:
        local: The run.
        files: Those of a head.
        address: Where hosts dial it.
    """
    like = files["agent.json"]["services"][-1]
    run_dir = local.run_dir
    relay = {
        **like,
        "name": "relay",
        "argv": [like["argv"][0], "-m", "sky_monarch.relay", str(run_dir / "relay.json")],
        "log": str(run_dir / "relay.log"),
        "pid_file": str(run_dir / "relay.pid"),
        "listen": _any_port(address),
    }
    private = str(run_dir / "private.json")
    return {
        "lighthouse.json": {**files["lighthouse.json"], "address": HEAD_ADDRESS},
        "controller.json": {**files["controller.json"], "tunnel": True},
        "relay.json": {"run_id": local.run_id, "private": private, "counts": str(run_dir / "tunnel.json")},
        "agent.json": {**files["agent.json"], "services": [*files["agent.json"]["services"], relay]},
    }


def _agent(config: Mapping[str, Any], address: str) -> dict[str, Any]:
    """The head's agent: its services listen where hosts reach them."""
    port = _any_port(address)
    listens: Mapping[str, str | Sequence[str]] = {"lighthouse": [port, port], "controller": port}
    services = [{**service, "listen": listens[service["name"]]} for service in config["services"]]
    return {**config, "services": services}
