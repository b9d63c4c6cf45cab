"""Network interfaces that the environment names."""

from __future__ import annotations

import time

import pytest

from sky_monarch.errors import ConfigError
from sky_monarch.training.interfaces import check_interfaces

pytestmark = pytest.mark.torch

PRESENT = ["lo", "eth0", "eth1"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": ""},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth1"},
        {"NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"NCCL_SOCKET_IFNAME": "nosuch,eth0"},
    ],
)
def test_an_interface_that_is_there_is_taken(env: dict[str, str]) -> None:
    check_interfaces(env, PRESENT)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("GLOO_SOCKET_IFNAME", "^lo", r"takes one name"),
        ("GLOO_SOCKET_IFNAME", "eth", r"no interface has that name; this host has lo, eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "nosuch0", r"no interface matches it; this host has lo, eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "=eth", r"no interface matches"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", r"no interface matches"),
    ],
)
def test_one_that_is_not_there_is_refused_with_those_that_are(variable: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_interfaces({variable: value}, PRESENT)
    assert refused.value.hint is not None
    assert variable in refused.value.hint


@pytest.mark.parametrize(
    ("variable", "value"), [("GLOO_SOCKET_IFNAME", "^lo"), ("NCCL_SOCKET_IFNAME", "nosuch0")]
)
def test_a_session_refuses_it_before_it_reaches_for_anything(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    import torch

    from sky_monarch.training import Session

    monkeypatch.setenv(variable, value)
    # Nobody listens there: it would be waited for.
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:9")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()
    session = Session(model, optimizer, target_step=1)
    with pytest.raises(ConfigError, match=rf"{variable} is .*this host has .*lo"), session:
        pass
    assert time.monotonic() - began < 15, "it would be waited for for 20 s"
