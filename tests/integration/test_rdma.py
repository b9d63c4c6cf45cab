"""Memory of one process that others read and write: real processes, each of the ways that bytes can take."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import errors
from sky_monarch.actors.rdma import Memory, memory_of
from sky_monarch.rdma import Domain, RDMABuffer
from tests.support.hip_double import with_double
from tests.support.hostile_owner import HostileOwner
from tests.support.rdma_owner import SECRET, Owner, pattern
from tests.support.waiting import eventually

MIB = 1 << 20
PATHS = ["cma", "shm", "tcp"]


@pytest.fixture
def domain() -> Iterator[Domain]:
    with Domain(SECRET) as domain:
        yield domain


@pytest.fixture
def owner() -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(*arguments: Any, **options: Any) -> Owner:
        made.append(Owner(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def liar() -> Iterator[Callable[..., HostileOwner]]:
    made: list[HostileOwner] = []

    def make(*arguments: Any, **options: Any) -> HostileOwner:
        made.append(HostileOwner(SECRET, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def kind_for(path: str) -> str:
    return "shared" if path == "shm" else "bytes"


def remote(owner: Owner, domain: Domain) -> RDMABuffer:
    return RDMABuffer.of_handle(owner.handle, owner.nbytes, domain)


@pytest.mark.parametrize("path", PATHS)
def test_bytes_arrive_equal_both_ways(owner: Callable[..., Owner], domain: Domain, path: str) -> None:
    nbytes = 3 * MIB + 17
    theirs = owner(nbytes, kind=kind_for(path))
    buffer = remote(theirs, domain)
    for digest in (True, False):
        mine = bytearray(nbytes)
        moved = buffer.read_into(mine, path=path, digest=digest)
        assert mine == pattern(nbytes)
        assert {part["path"] for part in moved.owners} == {path}
    part = bytearray(1000)
    buffer.read_into(part, offset=12_345, path=path)
    assert part == pattern(nbytes)[12_345:13_345]

    buffer.write_from(pattern(2 * MIB, seed=9), offset=5, path=path)
    assert bytes.fromhex(theirs.ask(do="bytes", at=0, length=10)) == pattern(5) + pattern(5, seed=9)
    end = 5 + 2 * MIB
    got = bytes.fromhex(theirs.ask(do="bytes", at=end - 3, length=6))
    assert got == pattern(2 * MIB, seed=9)[-3:] + pattern(nbytes)[end : end + 3]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_right_already_is_left_as_it_is(
    owner: Callable[..., Owner], domain: Domain, path: str
) -> None:
    nbytes = 8 * MIB + 17
    theirs = owner(nbytes, kind=kind_for(path))
    mine = bytearray(pattern(nbytes))
    into = memory_of(mine, writable=True)
    kept = domain.read_into([theirs.handle], into, timeout_s=20, keep=True, path=path)
    assert (kept.bytes, kept.kept) == (nbytes, nbytes)
    assert kept.owners == [{"bytes": 0, "path": None, "lost": None}], "nothing was moved"
    for place in (0, 3 * MIB + 5, nbytes - 1):
        mine[place] ^= 1
    kept = domain.read_into([theirs.handle], into, timeout_s=20, keep=True, path=path)
    assert mine == pattern(nbytes)
    assert 0 < kept.kept < nbytes
    assert kept.kept + kept.owners[0]["bytes"] == nbytes


@pytest.mark.parametrize("path", PATHS)
def test_every_way_refuses_alike(owner: Callable[..., Owner], domain: Domain, path: str) -> None:
    kind = kind_for(path)
    theirs, locked = owner(1000, kind=kind), owner(1000, kind=kind, writable=False)
    buffer = remote(theirs, domain)
    small = bytearray(10)
    for offset in (991, 1000, 2**63, 2**64 - 1):
        with pytest.raises(errors.OutOfBoundsError):
            buffer.read_into(small, offset=offset, path=path)
        with pytest.raises(errors.OutOfBoundsError):
            buffer.write_from(small, offset=offset, path=path)
    with pytest.raises(errors.AccessForbiddenError):
        remote(locked, domain).write_from(small, path=path)
    other_epoch = theirs.handle.replace('"epoch":1', '"epoch":2')
    assert other_epoch != theirs.handle
    with pytest.raises(errors.StaleHandleError, match="of epoch 1, not 2"):
        domain.read_into([other_epoch], memory_of(small, writable=True), timeout_s=5, path=path)
    theirs.ask(do="drop", timeout_s=1)
    for call in (buffer.read_into, buffer.write_from):
        with pytest.raises(errors.StaleHandleError):
            call(small, path=path)
    assert small == bytes(10), "nothing was moved"
    assert bytes.fromhex(locked.ask(do="bytes", at=0, length=10)) == pattern(10)


@pytest.mark.parametrize("path", PATHS)
def test_a_dead_owner_is_told_from_one_that_hangs(
    owner: Callable[..., Owner], domain: Domain, path: str
) -> None:
    theirs = owner(kind=kind_for(path))
    buffer, mine = remote(theirs, domain), bytearray(100)
    buffer.read_into(mine, path=path)
    theirs.stop()
    began = time.monotonic()
    with pytest.raises(errors.ChannelTimeoutError):
        buffer.read_into(mine, path=path, timeout=0.5)
    assert time.monotonic() - began < 10
    theirs.kill()
    began = time.monotonic()
    with pytest.raises(errors.ChannelClosedError):
        buffer.read_into(mine, path=path, timeout=60)
    assert time.monotonic() - began < 20, "it was not waited for"


def test_a_handle_of_an_owner_that_was_restarted_is_stale(
    owner: Callable[..., Owner], domain: Domain
) -> None:
    old, new = owner(), owner()
    old.kill()
    # As if it had the same port.
    forged = {**json.loads(old.handle), "address": json.loads(new.handle)["address"]}
    with pytest.raises(errors.StaleHandleError):
        domain.read_into([json.dumps(forged)], memory_of(bytearray(10), writable=True), timeout_s=5)


class Reading(threading.Thread):
    """A read in another thread, and how it ended."""

    def __init__(self, buffer: RDMABuffer, into: bytearray) -> None:
        super().__init__()
        self.buffer, self.into, self.error = buffer, into, ""
        self.start()

    def run(self) -> None:
        try:
            self.buffer.read_into(self.into)
        except errors.SkyMonarchError as error:
            self.error = type(error).__name__


@pytest.mark.parametrize(("timeout_s", "outcome"), [(30.0, ""), (0.05, "StaleHandleError")])
def test_what_an_operation_uses_is_not_freed(
    owner: Callable[..., Owner], domain: Domain, timeout_s: float, outcome: str
) -> None:
    """The owner waits for a reader; and where it does not, what that has read does not count."""
    nbytes = 2 * MIB
    theirs = owner(nbytes, bytes_per_s=MIB)
    mine, whole = bytearray(nbytes), pattern(nbytes)
    reading = Reading(remote(theirs, domain), mine)
    # Each half is under way, which takes two seconds.
    eventually(lambda: all(mine[at : at + 9] == whole[at : at + 9] for at in (0, MIB)), every_s=0.002)
    theirs.ask(do="drop", timeout_s=timeout_s)
    reading.join(30)
    assert reading.error == outcome
    if not outcome:
        assert mine == pattern(nbytes)


def test_an_owner_that_dies_leaves_its_pieces_to_the_others(
    owner: Callable[..., Owner], domain: Domain
) -> None:
    nbytes = 24 * MIB
    # What the second has begun takes it seconds: it is in the middle of that, whenever it is killed.
    owners = [owner(nbytes, bytes_per_s=rate * MIB) for rate in (16, 1, 16)]
    mine = bytearray(nbytes)

    def kill() -> None:
        eventually(lambda: owners[1].serves, every_s=0.002, what="the second is asked")
        owners[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    moved = domain.read_into([one.handle for one in owners], memory_of(mine, writable=True), timeout_s=30)
    killer.join()
    assert mine == pattern(nbytes)
    assert moved.owners[1]["lost"], "it died in the middle"
    assert moved.again > 0
    assert all(part["bytes"] > 0 for part in (moved.owners[0], moved.owners[2]))


LIES = ["wrong", "digest", "longer", "stranger", "garbage"]
SLOW_LIES = [pytest.param(lie, marks=pytest.mark.slow) for lie in ("endless", "silent")]


@pytest.mark.parametrize("lie", [*LIES, *SLOW_LIES])
def test_a_hostile_owner_is_named_and_its_pieces_are_read_elsewhere(
    owner: Callable[..., Owner], liar: Callable[..., HostileOwner], domain: Domain, lie: str
) -> None:
    nbytes = 4 * MIB
    # In pieces of 1 MiB, and not so fast that it is through with all of them before the other one is asked for any.
    honest, hostile = owner(nbytes, bytes_per_s=4 * MIB), liar(nbytes, lie)
    mine = bytearray(nbytes)
    moved = domain.read_into(
        [honest.handle, hostile.handle()], memory_of(mine, writable=True), timeout_s=30, streams=1
    )
    assert mine == pattern(nbytes)
    assert moved.owners[0]["bytes"] == nbytes
    assert moved.owners[1]["lost"], "it was found out"
    assert moved.again > 0


def test_nothing_is_read_of_who_cannot_prove_the_secret(owner: Callable[..., Owner], tmp_path: Path) -> None:
    theirs = owner()
    with Domain("another secret") as stranger, pytest.raises(errors.PeerRefusedError):
        remote(theirs, stranger).read_into(bytearray(10))

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    host, port = json.loads(theirs.handle)["address"].split(":")
    for data in (pickle.dumps(Payload()), b"SKYR\x02" + bytes(32) + bytes(32), b"SKYR\x03" + bytes(64)):
        answer = b""
        with (
            socket.create_connection((host, int(port)), timeout=10) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                answer += part
        assert len(answer) <= 69, "a proof, and nothing of the owner"
    assert not (tmp_path / "made").exists()
    with Domain(SECRET) as friend:
        remote(theirs, friend).read_into(bytearray(10))


def test_a_buffer_is_pickled_as_its_handle_and_needs_no_torch(domain: Domain) -> None:
    data = bytearray(pattern(100))
    sent = pickle.dumps(RDMABuffer(data, domain=domain))
    assert pattern(100) not in sent
    code = (
        "import pickle, sys\n"
        "mine = bytearray(100)\n"
        "buffer = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "buffer.read_into(mine)\n"
        "buffer.write_from(mine[::-1])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "print(buffer.size())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, sent.hex()],
        env={**os.environ, "SKY_MONARCH_TOKEN": SECRET},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "100\n", done.stderr
    assert data == pattern(100)[::-1]


def test_what_cannot_be_registered_is_refused_with_a_cause(domain: Domain) -> None:
    with pytest.raises(errors.ConfigError, match="a str cannot be"):
        RDMABuffer("text", domain=domain)
    with pytest.raises(errors.ConfigError, match=r"not writable|read-only"):
        RDMABuffer(b"constant", domain=domain)
    RDMABuffer(b"constant", domain=domain, writable=False).drop()
    with pytest.raises(errors.ConfigError, match="every interface"):
        Domain(SECRET, address="0.0.0.0")
    with pytest.raises(errors.ConfigError, match="must be numeric"):
        Domain(SECRET, address="localhost")
    with pytest.raises(errors.ConfigError, match="secret is empty"):
        Domain("")


class Torch:
    """What copies memory that nobody else can get at."""

    def __init__(self, data: bytearray, fails: bool = False, takes_s: float = 0) -> None:
        self.data, self.fails, self.takes_s = data, fails, takes_s
        self.rooms = 0

    def room(self, nbytes: int) -> tuple[int, object]:
        self.rooms += 1
        room = (ctypes.c_char * nbytes)()
        return ctypes.addressof(room), room

    def fetch(self, offset: int, address: int, nbytes: int) -> None:
        if self.fails:
            raise RuntimeError("an illegal address")
        time.sleep(self.takes_s)
        ctypes.memmove(address, bytes(self.data[offset : offset + nbytes]), nbytes)

    def store(self, offset: int, address: int, nbytes: int) -> None:
        self.data[offset : offset + nbytes] = ctypes.string_at(address, nbytes)


def test_memory_that_only_a_framework_can_get_at_is_staged_at_both_ends(domain: Domain) -> None:
    nbytes = 19 * MIB + 5
    with Domain(SECRET) as other:
        theirs = bytearray(pattern(nbytes))
        handle = other.register(Memory([(1, nbytes)], theirs, Torch(theirs)), writable=True)
        mine = bytearray(nbytes)
        into = Memory([(1, nbytes)], mine, Torch(mine))
        moved = domain.read_into([handle], into, timeout_s=30)
        assert (mine == theirs, moved.owners[0]["path"]) == (True, "tcp")
        mine[:] = pattern(nbytes, 3)
        domain.write_from(handle, into, timeout_s=30)
        assert theirs == pattern(nbytes, 3)
        part = bytearray(100)
        domain.read_into([handle], memory_of(part, writable=True), timeout_s=30, offset=9 * MIB)
        assert part == theirs[9 * MIB : 9 * MIB + 100]
        with pytest.raises(errors.SystemCallError):
            domain.read_into([handle], memory_of(part, writable=True), timeout_s=30, path="cma")

        fails = other.register(Memory([(1, nbytes)], theirs, Torch(theirs, fails=True)))
        with pytest.raises(errors.SkyMonarchError):
            domain.read_into([fails], memory_of(part, writable=True), timeout_s=30)
        again = domain.read_into([handle], memory_of(part, writable=True), timeout_s=30)
        assert again.bytes == 100, "it lives"


def test_an_owner_whose_device_takes_its_time_is_waited_for(domain: Domain) -> None:
    """It says nothing meanwhile, for longer than one without a device may."""
    with Domain(SECRET) as other:
        theirs, mine = bytearray(pattern(100)), bytearray(100)
        handle = other.register(Memory([(1, 100)], theirs, Torch(theirs, takes_s=2.5)))
        moved = domain.read_into([handle], memory_of(mine, writable=True), timeout_s=30)
        assert (moved.again, mine == theirs) == (0, True)


def test_memory_that_devices_are_staged_in_is_used_again_by_all_who_read(domain: Domain) -> None:
    """Each reading has its connections, and each step of a heal its registration."""
    with Domain(SECRET) as other:
        theirs, mine = bytearray(pattern(9 * MIB)), bytearray(9 * MIB)
        rooms = 0
        for _ in range(12):
            given = Torch(theirs)
            handle = other.register(Memory([(1, len(theirs))], theirs, given))
            domain.read_into([handle], memory_of(mine, writable=True), timeout_s=30)
            other.deregister(handle, timeout_s=5)
            rooms += given.rooms
        assert mine == theirs
        assert 1 <= rooms <= 8


def test_a_program_may_end_while_its_device_copies_for_a_peer(domain: Domain) -> None:
    """A thread that comes back to Python while that ends would abort the process."""
    code = textwrap.dedent("""
        import sys, time
        from sky_monarch.actors.rdma import Memory
        from sky_monarch.rdma import Domain
        class Slow:
            def room(self, nbytes):
                self.kept = bytearray(nbytes)
                from sky_monarch import _core
                return _core.buffer_segment(self.kept, True)[0], self.kept
            def fetch(self, offset, address, nbytes):
                print("copying", flush=True)
                for _ in range(200):
                    time.sleep(0.002)
        class Late:
            def __del__(self, sleep=time.sleep):
                sleep(0.5)
        domain = Domain(sys.argv[1])
        print(domain.register(Memory([(1, 100)], None, Slow())), flush=True)
        late = Late()  # Python is ending for as long as that takes
        sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code, SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ending:
        assert ending.stdin is not None
        assert ending.stdout is not None
        assert ending.stderr is not None
        handle = ending.stdout.readline().strip()

        def read() -> None:
            with contextlib.suppress(errors.SkyMonarchError):
                domain.read_into([handle], memory_of(bytearray(100), writable=True), timeout_s=20)

        reader = threading.Thread(target=read)
        reader.start()
        assert ending.stdout.readline() == "copying\n"
        ending.stdin.close()
        assert (ending.wait(20), ending.stderr.read()) == (0, "")
        reader.join(20)


@pytest.mark.parametrize("fault", ["", f"pin:{4 * MIB}"])
def test_memory_of_a_device_is_lent_and_read_into_on_the_double(fault: str) -> None:
    """SIMULATED: no host can follow the addresses, so that a copy past the runtime would end the process."""
    code = textwrap.dedent("""
        from sky_monarch.actor import DeviceBuffer
        from sky_monarch.errors import OutOfBoundsError
        from sky_monarch.rdma import Domain, RDMABuffer
        from tests.support.rdma_owner import pattern
        nbytes = (9 << 20) + 3
        theirs, mine = DeviceBuffer(nbytes).write(pattern(nbytes)), DeviceBuffer(nbytes)
        with Domain("secret") as owner, Domain("secret") as reader:
            buffer = RDMABuffer(theirs, domain=owner)
            far = RDMABuffer.of_handle(buffer.handle, buffer.size(), reader)
            assert far.read_into(mine).owners[0]["path"] == "tcp"
            assert mine.read() == pattern(nbytes)
            far.write_from(mine.write(pattern(nbytes, 1)))
            assert theirs.read() == pattern(nbytes, 1)
            host = bytearray(10)
            far.read_into(host, offset=nbytes - 10)
            assert host == pattern(nbytes, 1)[-10:]
            try:
                far.read_into(host, offset=nbytes - 9)
            except OutOfBoundsError:
                print("done")
    """)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=with_double(SKY_DOUBLE_FAULT=fault),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "done\n", done.stderr
    assert "SIMULATED" in done.stderr


def test_no_more_connections_are_served_than_allowed(owner: Callable[..., Owner]) -> None:
    from sky_monarch import _core

    core = _core.RdmaDomain("127.0.0.1", SECRET, max_connections=2)
    host, port = core.address.split(":")
    idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(2)]
    try:
        with socket.create_connection((host, int(port)), timeout=10) as third:
            assert third.recv(1) == b"", "hung up on at once"
    finally:
        for one in idle:
            one.close()
        core.close()
