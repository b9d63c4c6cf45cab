"""How a host that was provisioned becomes one of its run: ``python -m sky_monarch.agent --enrol FOLDER``.

The environment brings what the agent is told, in ``SKY_MONARCH_HOST`` (JSON, no secret), and what it proves itself
with, in ``SKY_MONARCH_ENROLMENT`` (base64 of JSON, the secret). Both leave the environment before anything else
happens; what they held lies in files of this user alone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError, SystemCallError

__all__ = ["clean_environment", "documents", "enrol", "told"]

_HOST = "SKY_MONARCH_HOST"
_ENROLMENT = "SKY_MONARCH_ENROLMENT"
_BY_HAND = "`sky-monarch up` sets it for the hosts that it provisions: this is not started by hand"
# Whatever else begins like these says which process of which run another process is.
_PREFIX = "SKY_MONARCH_"
_KEPT = frozenset(
    {
        "SKY_MONARCH_LOG",
        "SKY_MONARCH_MUTANT",
        "SKY_MONARCH_STATE_DIR",
        "SKY_MONARCH_TEST_DOCTOR_TREES",
    }
)
_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes; some room
_SHORT_TEMPORARY = Path("/tmp")  # noqa: S108  (the folder in it is 0700, and checked)


def enrol(folder: Path, environ: MutableMapping[str, str], *, version: str) -> Path:
    """Write ``agent.json`` and ``private.json`` of this host.

    Args:
        folder: Where they go, and the logs of the host; made where it is missing. Absolute.
        environ: Holds the two variables, which are removed from it.
        version: Of this installation.

    Returns:
        Path of ``agent.json``.

    Raises:
        ConfigError: A variable is missing or damaged, this installation is not the launcher's, or this host has no
            address that the head could be reached from. No message shows what is secret.
        SystemCallError: The files could not be written.
    """
    host, private = documents(environ, version=version)
    config = {key: value for key, value in host.items() if key != "version"}
    config["address"] = _address(host)
    if isinstance(doctor := config.get("doctor"), dict):
        config["doctor"] = {**doctor, "argv": [sys.executable, *doctor.get("argv", ())]}
    config |= {"run_dir": str(folder), "private": str(folder / "private.json")}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        config["socket"] = str(_socket(folder))
        _write(folder / "private.json", private)
        _write(folder / "agent.json", config)
    except OSError as error:
        raise SystemCallError(f"{folder} cannot be used for this host's files: {error.strerror}") from error
    return folder / "agent.json"


def told(environ: Mapping[str, str]) -> dict[str, Any]:
    """What this host is told. It stays where it is.

    Raises:
        ConfigError: It is missing or damaged.
    """
    return _document(_HOST, environ.get(_HOST))


def documents(environ: MutableMapping[str, str], *, version: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What this host is told, and its secret: both are removed from the environment.

    Raises:
        ConfigError: A variable is missing or damaged, or this installation is not the launcher's.
    """
    public, secret = environ.pop(_HOST, None), environ.pop(_ENROLMENT, None)
    host = _document(_HOST, public)
    _check_version(host, version)
    return host, _document(_ENROLMENT, _decoded(secret))


def clean_environment(environ: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The environment of an agent: that of the host, without what another process was told about itself."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_PREFIX)}
    return {**kept, "SKY_MONARCH_RUN_ID": run_id}


def _document(name: str, text: str | None) -> dict[str, Any]:
    if not text:
        raise ConfigError(f"{name} is not set", hint=_BY_HAND)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} holds no JSON object", hint=_BY_HAND)
    return value


def _decoded(secret: str | None) -> str | None:
    if not secret:
        return None
    try:
        return base64.b64decode(secret, validate=True).decode()
    except (binascii.Error, ValueError):
        raise ConfigError(f"{_ENROLMENT} is not base64", hint=_BY_HAND) from None


def _check_version(host: Mapping[str, Any], version: str) -> None:
    """Agents and controllers of different versions would misread each other: better said now, in one line."""
    launched = host.get("version")
    if launched == version:
        return
    if not isinstance(launched, str):
        raise ConfigError(f"{_HOST} names no version", hint=_BY_HAND)
    raise ConfigError(
        f"host {host.get('host', 'head')} has sky-monarch {version}, the run was launched by {launched}",
        hint=f"on the host: `pip install sky-monarch=={launched}`, or none at all in its image, so that the launcher's "
        f"own is used; where you launch: `pip install sky-monarch=={version}`, then `sky-monarch up` again",
    )


def _address(host: Mapping[str, Any]) -> str:
    """The numeric address that ranks of other hosts reach this one at."""
    address = host.get("address", "auto")
    if address == "auto":
        return _source_address(str(host.get("controller", "")))
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ConfigError(f"{_HOST}: address is {address!r}, neither a number nor auto") from None


def _source_address(controller: str) -> str:
    """Where packets to the head come from. Nothing is sent for it."""
    if controller.startswith("unix:"):
        return "127.0.0.1"
    place, _, port = controller.removeprefix("tls:").rpartition(":")
    name = place.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal():
        raise ConfigError(f"{_HOST}: controller is {controller!r}, not tls:<host>:<port>")
    fix = "choose one that hosts reach: `sky-monarch up --head-address`"
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"the head's address {name} is unknown here: {error}", hint=fix) from error
    reasons = []
    for family, kind, protocol, _, at in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(at)
            except OSError as error:
                reasons.append(f"{at[0]}: {error.strerror}")
                continue
            return str(probe.getsockname()[0]).partition("%")[0]
    raise ConfigError(f"this host has no route to the head ({', '.join(reasons)})", hint=fix)


def _socket(folder: Path) -> Path:
    """Where ranks dial the agent: in ``folder``, unless the path would be too long for a unix socket."""
    name = f"sky-monarch-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    for place in (folder, Path(tempfile.gettempdir()) / name):
        if len(os.fsencode(place / "agent.sock")) <= _SOCKET_PATH_LIMIT:
            break
    else:
        place = _SHORT_TEMPORARY / name
    if place != folder:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        seen = place.lstat()
        # Anybody may make a folder of that name first.
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
            raise ConfigError(f"{place} belongs to another user", hint="set TMPDIR to a folder of your own")
        place.chmod(0o700)
    return place / "agent.sock"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file for this user alone, whole or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
