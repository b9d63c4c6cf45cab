"""How a provisioned host is told what it is: files for one user, no secret left in the environment, clear refusals."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.enrolment import clean_environment, enrol
from sky_monarch.errors import ConfigError

SECRET = "0f1e2d3c4b5a"
HOST = {
    "version": "1.2.3",
    "run_id": "job-20261130-120000-abcd",
    "host": "job-h0",
    "attempt": 2,
    "controller": "tls:127.0.0.1:4000",
    "address": "auto",
    "workdir": None,
    "inherit_env": True,
}
IDENTITY = {"name": "job-h0-a2", "ca_pem": "CA", "cert_pem": "CERT", "key_pem": f"KEY {SECRET}"}


def environment(host: dict[str, Any] | None = None, enrolment: str | None = None) -> dict[str, str]:
    private = {"token": SECRET, "identities": {"agent": IDENTITY}}
    secret = base64.b64encode(json.dumps(private).encode()).decode()
    told = HOST if host is None else host
    return {
        "SKY_MONARCH_HOST": json.dumps(told),
        "SKY_MONARCH_ENROLMENT": enrolment or secret,
        "PATH": "/bin",
    }


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_what_the_environment_held_is_in_files_of_one_user_and_nowhere_else(tmp_path: Path) -> None:
    folder, environ = tmp_path / "runs" / "job-h0-a2", environment()
    before = os.umask(0)
    try:
        config = enrol(folder, environ, version="1.2.3")
    finally:
        os.umask(before)
    assert environ == {"PATH": "/bin"}
    assert config == folder / "agent.json"
    assert {path.name for path in folder.iterdir()} == {"agent.json", "private.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read(folder / "private.json") == {"token": SECRET, "identities": {"agent": IDENTITY}}
    told = read(config)
    assert SECRET not in config.read_text()
    assert "version" not in told
    assert (told["run_dir"], told["private"]) == (str(folder), str(folder / "private.json"))
    assert told["socket"] == str(folder / "agent.sock")
    assert told["address"] == "127.0.0.1", "where packets to the head come from"
    assert {key: told[key] for key in ("run_id", "host", "attempt", "controller", "inherit_env")} == {
        key: HOST[key] for key in ("run_id", "host", "attempt", "controller", "inherit_env")
    }


def test_a_second_start_of_the_same_attempt_finds_its_folder_and_writes_it_anew(tmp_path: Path) -> None:
    enrol(tmp_path, environment(), version="1.2.3")
    enrol(tmp_path, environment({**HOST, "address": "10.1.2.3"}), version="1.2.3")
    assert read(tmp_path / "agent.json")["address"] == "10.1.2.3"


@pytest.mark.parametrize("theirs", ["1.2.2", "1.3.0", "2.0.0.dev1"])
def test_another_version_is_refused_in_one_line_with_both_and_what_to_do(tmp_path: Path, theirs: str) -> None:
    environ, folder = environment({**HOST, "version": theirs}), tmp_path / "host"
    with pytest.raises(ConfigError) as refused:
        enrol(folder, environ, version="1.2.3")
    assert str(refused.value) == f"host job-h0 has sky-monarch 1.2.3, the run was launched by {theirs}"
    assert refused.value.hint is not None
    assert f"on the host: `pip install sky-monarch=={theirs}`" in refused.value.hint
    assert "where you launch: `pip install sky-monarch==1.2.3`" in refused.value.hint
    assert not folder.exists(), "nothing was written"
    assert environ == {"PATH": "/bin"}, "and the secret is gone all the same"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SKY_MONARCH_HOST": None}, "SKY_MONARCH_HOST is not set"),
        ({"SKY_MONARCH_HOST": "{"}, "SKY_MONARCH_HOST holds no JSON object"),
        ({"SKY_MONARCH_HOST": "[1]"}, "SKY_MONARCH_HOST holds no JSON object"),
        ({"SKY_MONARCH_HOST": "{}"}, "names no version"),
        ({"SKY_MONARCH_ENROLMENT": None}, "SKY_MONARCH_ENROLMENT is not set"),
        ({"SKY_MONARCH_ENROLMENT": f"{SECRET}!"}, "is not base64"),
        ({"SKY_MONARCH_ENROLMENT": base64.b64encode(SECRET.encode()).decode()}, "holds no JSON object"),
        ({"SKY_MONARCH_HOST": json.dumps({**HOST, "address": "host.example"})}, "neither a number nor auto"),
        ({"SKY_MONARCH_HOST": json.dumps({**HOST, "controller": "tls:nowhere"})}, "not tls:<host>:<port>"),
        ({"SKY_MONARCH_HOST": json.dumps({**HOST, "controller": "tls:a.invalid:1"})}, "is unknown here"),
    ],
)
def test_what_cannot_be_used_is_named_and_no_secret_is_shown(
    tmp_path: Path, changes: dict[str, str | None], words: str
) -> None:
    environ = {name: value for name, value in {**environment(), **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words) as refused:
        enrol(tmp_path / "host", environ, version="1.2.3")
    assert SECRET not in f"{refused.value} {refused.value.hint}"
    assert environ == {"PATH": "/bin"}
    assert not (tmp_path / "host").exists()


def test_the_address_is_the_one_that_the_route_to_the_head_begins_at(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    told = {**HOST, "controller": "tls:[::1]:4000"}
    try:
        config = enrol(tmp_path, environment(told), version="1.2.3")
    except ConfigError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert read(config)["address"] == "::1"


def test_a_folder_with_a_long_name_has_its_socket_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = enrol(tmp_path / ("x" * 100), environment(), version="1.2.3")
    path = Path(read(config)["socket"])
    assert path.parent.parent == tmp_path
    assert len(os.fsencode(path)) <= 100
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # Somebody who was there first gets nothing.
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="another user"):
        enrol(tmp_path / ("x" * 100), environment(), version="1.2.3")


def test_an_agent_inherits_the_host_and_nothing_of_who_started_it() -> None:
    inherited = {
        "PATH": "/bin",
        "ROCM_PATH": "/opt/rocm",
        "SKYPILOT_NODE_RANK": "0",
        "SKY_MONARCH_LOG": "debug",
        "SKY_MONARCH_RUN_ID": "another",
        "SKY_MONARCH_SPAWN_ID": "another's",
        "SKY_MONARCH_LISTEN_FD": "3",
    }
    assert clean_environment(inherited, "run-1") == {
        "PATH": "/bin",
        "ROCM_PATH": "/opt/rocm",
        "SKYPILOT_NODE_RANK": "0",
        "SKY_MONARCH_LOG": "debug",
        "SKY_MONARCH_RUN_ID": "run-1",
    }
