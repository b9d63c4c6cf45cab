"""``_core`` is what its stubs say, and its errors are ours."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sky_monarch
from sky_monarch import errors

_core = pytest.importorskip("sky_monarch._core", reason="the extension is not built")

STUB = Path(sky_monarch.__file__).with_name("_core.pyi")

CLASS_OF_KIND = {
    "invalid_input": errors.ConfigError,
    "refused": errors.PeerRefusedError,
    "timed_out": errors.ChannelTimeoutError,
    "closed": errors.ChannelClosedError,
    "too_large": errors.FrameTooLargeError,
    "protocol": errors.ProtocolError,
    "io": errors.SystemCallError,
    "quorum": errors.QuorumError,
    "device": errors.DeviceError,
    "not_joined": errors.NotJoinedError,
    "communicator": errors.CommunicatorError,
    "out_of_bounds": errors.OutOfBoundsError,
    "forbidden": errors.AccessForbiddenError,
    "stale": errors.StaleHandleError,
    "corrupt": errors.DigestError,
}


def names_in_stub() -> Iterator[tuple[str, ...]]:
    for node in ast.parse(STUB.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield (name,)
            case ast.ClassDef(name=name, body=body):
                yield (name,)
                yield from ((name, item.name) for item in body if isinstance(item, ast.FunctionDef))


def test_everything_in_the_stub_exists() -> None:
    names = list(names_in_stub())
    assert len(names) > 20, "the stub was read"
    for path in names:
        here = _core
        for name in path:
            assert hasattr(here, name), ".".join(path)
            here = getattr(here, name)


def test_everything_public_is_in_the_stub() -> None:
    stubbed = set(names_in_stub())
    for name in dir(_core):
        if name.startswith("_"):
            continue
        assert (name,) in stubbed
        value = getattr(_core, name)
        if isinstance(value, type):
            missing = {item for item in vars(value) if not item.startswith("_")} - {
                path[1] for path in stubbed if path[0] == name and len(path) == 2
            }
            assert not missing, name


def test_every_kind_of_error_has_exactly_one_class() -> None:
    assert set(_core.error_kinds()) == set(CLASS_OF_KIND)
    assert len(set(CLASS_OF_KIND.values())) == len(CLASS_OF_KIND)
    for kind, wanted in CLASS_OF_KIND.items():
        with pytest.raises(errors.SkyMonarchError) as raised:
            _core.raise_kind(kind, "because")
        assert type(raised.value) is wanted
        assert "because" in str(raised.value)
        assert raised.value.hint is None
    with pytest.raises(errors.ConfigError, match="no kind of error"):
        _core.raise_kind("unheard_of", "")


def test_the_package_imports_where_the_core_is_absent() -> None:
    code = (
        "import sys; sys.modules['sky_monarch._core'] = None\n"
        "import sky_monarch.actors as actors\n"
        "assert actors.AgentClient and actors.ChannelServer and actors.LighthouseClient\n"
        "try: actors.AgentClient('unix:/x', 't', 'r', replica=0, rank=0, generation=1)\n"
        "except ImportError: print('absent')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=STUB.parents[1])
    assert ran.stdout == "absent\n", ran.stderr


def test_importing_the_core_starts_nothing() -> None:
    code = (
        "import logging, threading, os\n"
        "before = dict(os.environ)\n"
        "import sky_monarch._core\n"
        "assert dict(os.environ) == before\n"
        "assert not logging.getLogger().handlers\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=STUB.parents[1])
    assert ran.stdout == "1\n", ran.stderr


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e10, 1e300])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(errors.ConfigError, match="connect_timeout_s"):
        _core.LighthouseClient("http://127.0.0.1:9", seconds)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:9", "https://127.0.0.1:9", "unix:/x", "http://", "http://a b:1"]
)
def test_a_lighthouse_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigError):
        _core.LighthouseClient(address, 1.0)


def test_a_lighthouse_that_is_not_there_is_named_without_the_secret() -> None:
    with pytest.raises(errors.ChannelTimeoutError, match=r"127\.0\.0\.1:9 .*refused") as raised:
        _core.LighthouseClient("http://r1.g3.s3cret@127.0.0.1:9", 1.0)
    assert "s3cret" not in str(raised.value)
