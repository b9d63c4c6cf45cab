"""The controller's channel over TLS: the authority that is kept and taken up again, and who is let in by name."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import errors
from tests.support import wire

pytest.importorskip("sky_monarch._core", reason="the extension is not built")

from sky_monarch.actors import Authority, ChannelClient, ChannelServer
from sky_monarch.actors.channel_server import ChannelEvent


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("run-1", 3600)


def listening() -> int:
    """A listening socket as an agent passes it on."""
    bound = socket.create_server(("127.0.0.1", 0))
    return bound.detach()


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[ChannelServer]:
    controller = authority.issue("controller")
    address = f"unix:{tmp_path / 'c.sock'}"
    with ChannelServer(address, "token", "run-1", identity=controller, listener_fd=listening()) as server:
        yield server


def next_event(server: ChannelServer) -> ChannelEvent:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        select.select([server.fileno()], [], [], 1)
        for event in server.drain(1):  # readable once more where there may have been others
            return event
    raise AssertionError("nothing arrived")


def dial(
    server: ChannelServer, identity: Mapping[str, str] | None, *, token: str = "token", **about: Any
) -> ChannelClient:
    assert server.tls_address is not None
    hello = {**wire.agent("job-h0"), "attempt": 1, **about}
    return ChannelClient(server.tls_address, token, "run-1", hello, 10, identity=identity)


def test_an_authority_issues_the_same_certificates_after_a_round_trip(authority: Authority) -> None:
    kept = json.loads(json.dumps(authority.to_json()))
    assert set(kept) == {"run_id", "ca_pem", "key_pem", "expires_s"}
    assert abs(kept["expires_s"] - time.time() - 3600) < 600
    again = Authority.from_json(kept)
    assert again == authority
    assert "PRIVATE" not in repr(again)
    identity = again.issue("job-h0-a1")
    assert set(identity) == {"name", "ca_pem", "cert_pem", "key_pem"}
    assert (identity["name"], identity["ca_pem"]) == ("job-h0-a1", authority.ca_pem)


@pytest.mark.parametrize("name", ["", "a.b", "x" * 64, "a_b"])
def test_a_name_that_no_certificate_may_hold_is_refused(authority: Authority, name: str) -> None:
    with pytest.raises(errors.ConfigError, match="DNS label"):
        authority.issue(name)


def test_a_damaged_authority_is_refused_without_its_key(authority: Authority) -> None:
    for damage in ({"key_pem": "PRIVATE"}, {"ca_pem": "x"}, {"expires_s": -1}):
        with pytest.raises(errors.ConfigError) as refused:
            Authority.from_json({**authority.to_json(), **damage}).issue("a")
        assert "PRIVATE" not in str(refused.value)
    for missing in ("run_id", "ca_pem", "key_pem", "expires_s"):
        kept = {key: value for key, value in authority.to_json().items() if key != missing}
        with pytest.raises(errors.ConfigError, match="no authority"):
            Authority.from_json(kept)


def test_agents_of_either_kind_meet_their_controller_and_are_told_apart(
    server: ChannelServer, authority: Authority, tmp_path: Path
) -> None:
    # What was kept has issued this one: the run's controller may have been restarted in between.
    identity = Authority.from_json(authority.to_json()).issue("job-h0-a1")
    with dial(server, identity, probe="10.0.0.1:4242") as far:
        opened = next_event(server)
        assert opened.data["certificate"] == "job-h0-a1"
        assert (opened.data["host"], opened.data["attempt"]) == ("job-h0", 1)
        assert opened.data["probe"] == "10.0.0.1:4242"
        server.send(opened.connection, {"type": "release"})
        assert far.recv(10) == {"type": "release"}
        target = {"host": "job-h1", "attempt": 2, "address": "10.0.0.2:4242"}
        server.send(opened.connection, {"type": "probe", "targets": [target], "deadline_s": 10})
        assert far.recv(10) == {"type": "probe", "targets": [target], "deadline_s": 10.0}
    assert next_event(server).kind == "closed"
    with ChannelClient(server.address, "token", "run-1", wire.agent("head"), 10):
        opened = next_event(server)
        assert opened.data == {**wire.agent("head"), "examining": False, "certificate": None}
    assert stat_mode(tmp_path / "c.sock") == 0o600


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("name", "about", "words"),
    [
        ("job-h1-a1", {}, "job-h1-a1 does not speak for host job-h0, attempt 1"),
        ("job-h0-a1", {"attempt": 2}, "job-h0-a1 does not speak for host job-h0, attempt 2"),
        ("job-h0-a1", {"attempt": 0}, "job-h0-a1 does not speak for host job-h0, attempt 0"),
        ("job-h0", {"attempt": 1}, "job-h0 does not speak for host job-h0, attempt 1"),
        ("lighthouse", {"host": "head", "attempt": 0}, "lighthouse does not speak for host head"),
    ],
)
def test_a_certificate_speaks_for_its_own_host_and_attempt_alone(
    server: ChannelServer, authority: Authority, name: str, about: dict[str, Any], words: str
) -> None:
    with pytest.raises(errors.PeerRefusedError, match=words):
        dial(server, authority.issue(name), **about)
    assert server.drain() == []


def test_a_stranger_gets_no_word_in(server: ChannelServer, authority: Authority) -> None:
    stranger = Authority.create("run-1", 3600).issue("job-h0-a1")
    refused = (errors.PeerRefusedError, errors.ChannelClosedError)
    with pytest.raises(refused):  # it trusts another authority, and is trusted by none
        dial(server, stranger)
    with pytest.raises(refused):  # it even trusts the right one
        dial(server, {**stranger, "ca_pem": authority.ca_pem})
    with pytest.raises(errors.PeerRefusedError, match="the token is not this run's"):
        dial(server, authority.issue("job-h0-a1"), token="guess")
    with pytest.raises(errors.ConfigError, match="no certificate"):
        dial(server, None)
    assert server.drain() == []


def test_a_host_that_poses_as_the_controller_is_found_out(tmp_path: Path, authority: Authority) -> None:
    false = authority.issue("job-h1-a1")
    address = f"unix:{tmp_path / 'c.sock'}"
    with (
        ChannelServer(address, "token", "run-1", identity=false, listener_fd=listening()) as server,
        pytest.raises(errors.PeerRefusedError, match="not valid for name"),
    ):
        dial(server, authority.issue("job-h0-a1"))


def test_who_is_hung_up_on_is_told_why(server: ChannelServer, authority: Authority) -> None:
    with dial(server, authority.issue("job-h0-a1")) as far:
        opened = next_event(server)
        server.disconnect(opened.connection, "fenced: host job-h0 is at attempt 2")
        assert far.recv(10) == {"type": "dropped", "reason": "fenced: host job-h0 is at attempt 2"}
        with pytest.raises(errors.ChannelClosedError):
            far.recv(10)


def test_what_is_no_listening_socket_or_no_certificate_is_refused(
    tmp_path: Path, authority: Authority
) -> None:
    address, controller = f"unix:{tmp_path / 'c.sock'}", authority.issue("controller")
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(errors.ConfigError, match="no listening socket"):
            ChannelServer(address, "token", "run-1", identity=controller, listener_fd=read_end)
    finally:
        os.close(read_end)  # it is still ours
        os.close(write_end)
    with pytest.raises(errors.ConfigError, match="no certificate"):
        ChannelServer(address, "token", "run-1", listener_fd=listening())
    fd = listening()
    try:
        with pytest.raises(errors.ConfigError, match="no identity") as refused:
            ChannelServer(address, "token", "run-1", identity={"key_pem": "PRIVATE"}, listener_fd=fd)
    finally:
        os.close(fd)  # so is this one: nothing was taken over
    assert "PRIVATE" not in str(refused.value)
