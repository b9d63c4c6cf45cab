"""Where hosts dial the head."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from sky_monarch.errors import ConfigError
from sky_monarch.launch.address import head_address, is_loopback


def test_an_address_of_this_machine_is_taken_as_it_is():
    assert head_address("127.0.0.1") == "127.0.0.1"
    assert head_address("127.0.0.9") == "127.0.0.9"
    assert is_loopback(head_address("localhost"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("192.0.2.7", "this machine has no such address"),
        ("0.0.0.0", "no host can dial 0.0.0.0"),
        ("224.0.0.1", "no host can dial"),
        ("no such name.invalid", "names no address"),
    ],
)
def test_an_address_that_hosts_cannot_dial_is_refused_before_anything_is_started(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        head_address(given)

    assert caught.value.hint


def test_by_default_it_is_the_one_that_others_see():
    try:
        found = ipaddress.ip_address(head_address(None))
    except ConfigError:
        pytest.skip("this machine has no route to others")
    assert not found.is_loopback
    with socket.socket(socket.AF_INET if found.version == 4 else socket.AF_INET6) as probe:
        probe.bind((str(found), 0))


def test_without_any_route_it_has_to_be_given(monkeypatch):
    def unreachable(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    class Unreachable(socket.socket):
        connect = unreachable

    monkeypatch.setattr(socket, "socket", Unreachable)

    with pytest.raises(ConfigError, match="no route to others") as caught:
        head_address(None)

    assert "--head-address ADDRESS" in (caught.value.hint or "")
