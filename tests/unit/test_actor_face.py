"""The public face of the actor API: what it holds, what it costs, and what it refuses at once."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import sky_monarch.actor as face
from sky_monarch.actor import Actor, endpoint
from sky_monarch.actors import serial
from sky_monarch.actors.actor import RESERVED
from sky_monarch.actors.actor_mesh import ActorMesh
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import ConfigError


def test_every_public_name_is_there():
    assert sorted(face.__all__) == list(face.__all__)
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Actr'"):
        face.Actr  # noqa: B018


def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys; import sky_monarch.actor as a; a.Actor, a.this_host, a.Future\n"
        "heavy = {'torch', 'numpy', 'asyncio', 'httpx', 'pydantic', 'cloudpickle', 'subprocess'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    root = Path(face.__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert ran.stdout == "\n"


def test_no_endpoint_may_have_a_name_that_a_mesh_has():
    public = {name for name in dir(ActorMesh) if not name.startswith("_")}
    assert public == RESERVED
    for name in [*sorted(RESERVED), "__supervise__", "_private"]:
        with pytest.raises(ConfigError, match=rf"Clash\.{name} cannot be an endpoint") as refused:
            type("Clash", (Actor,), {name: endpoint(lambda self: None)})
        assert "rename it" in refused.value.hint


def test_endpoints_are_inherited_and_replaced():
    class Base(Actor):
        @endpoint
        def one(self): ...

        @endpoint
        def two(self): ...

    class Derived(Base):
        two = None

        @endpoint
        def three(self): ...

    assert set(Base._endpoints) == {"one", "two"}
    assert set(Derived._endpoints) == {"one", "three"}


def test_an_endpoint_of_a_class_cannot_be_called():
    class Base(Actor):
        @endpoint
        def one(self): ...

    with pytest.raises(ConfigError, match="one is called on a mesh of actors"):
        Base.one.call()
    with pytest.raises(ConfigError, match="@endpoint marks a method"):
        endpoint(3)


@pytest.mark.parametrize("size", [0, 10, serial.INLINE - 1, serial.INLINE, 3 * serial.INLINE])
def test_bytes_of_any_size_come_back_as_they_were(size):
    value = bytes(range(256)) * (size // 256 + 1)
    value = value[:size]
    body, buffers = serial.dump_call((value, [value]), {"key": value})
    (one, (two,)), kwargs = serial.loads(body, buffers)
    assert one == two == kwargs["key"] == value
    assert type(one) is bytes
    if size >= serial.INLINE:
        assert buffers is not None
        assert len(body) < 4 * size, "large bytes travel beside the body"


def test_a_large_array_travels_beside_the_body_and_stays_writable():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(100_000)
    body, buffers = serial.dump_result(array)
    assert len(body) < 1000
    assert [buffer.nbytes for buffer in buffers or ()] == [array.nbytes]
    back = serial.loads(body, [bytearray(buffer) for buffer in buffers or ()])
    back += 1
    assert (back == array + 1).all()
    strided = serial.loads(*serial.dump_result(array[::2]))
    assert (strided == array[::2]).all()


def test_an_exception_that_cannot_be_pickled_still_says_what_it_was():
    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    try:
        raise OddError(1, 2)
    except OddError as error:
        remote = pickle.loads(pickle.dumps(RemoteError.of(error)))
    back = remote.exception()
    assert "OddError: 1 and 2" in str(back)
    assert remote.where.startswith(__file__)
    assert back.__traceback__ is not None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_signatures_of_endpoints_are_seen_by_the_type_checker(tmp_path):
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(
        "from sky_monarch.actor import Actor, endpoint, this_host\n"
        "class A(Actor):\n"
        "    @endpoint\n"
        "    async def add(self, n: int) -> str:\n"
        "        return str(n)\n"
        "    @endpoint\n"
        "    def sub(self, n: int) -> str:\n"
        "        return str(n)\n"
        "mesh = this_host().spawn_procs({'gpus': 2}).spawn('a', A)\n"
        "reveal_type(mesh.slice(gpus=0).add.call_one(1).get())\n"
        "reveal_type(mesh.sub.call(1).get())\n"
        "mesh.add.call_one('x')\n"
    )
    ast.parse(program.read_text())
    out, _, _ = api.run(["--strict", "--cache-dir", str(tmp_path / "cache"), str(program)])
    assert 'Revealed type is "builtins.str"' in out or 'Revealed type is "str"' in out, out
    assert "ValueMesh[" in out
    assert "str]" in out
    assert 'incompatible type "str"; expected "int"' in out, out
