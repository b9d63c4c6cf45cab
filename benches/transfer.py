"""How fast a state gets from donors into a joiner: ours, TorchFT's two transports, and what the machine can do.

    python -m benches transfer --mib 1024 --rounds 5

Donors are processes of their own. "fresh": into memory that was never touched, as in a new process, of whichever peer:
what the allocator had once goes back to the kernel. How fast the kernel gives such pages, with a thread for each core,
is a limit of its own (``fresh_pages_gibps``). "warm": into parameters that are there. All peers take turns, with the
same state. ``--mib 4096`` needs 12 GiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benches.report import emit

GIB = 1 << 30
SECRET = "of a bench"
LIMIT = timedelta(seconds=600)
THROTTLE = 200_000_000
STEP, QUORUM = 7, 3
_PARTS = 16


def state_of(mib: int, *, fill: bool = True) -> dict[str, Any]:
    """Weights and Adam's two moments, ``mib`` together; without ``fill`` their memory is not touched."""
    import torch

    floats = mib * (1 << 20) // 4 // 3 // _PARTS

    def tensor(value: int) -> Any:
        return torch.full((floats,), float(value)) if fill else torch.empty(floats)

    weights = {f"layer{index}": tensor(index) for index in range(_PARTS)}
    moments = {i: {"exp_avg": tensor(i + 1), "exp_avg_sq": tensor(i + 2)} for i in range(_PARTS)}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}


def tensors_of(state: dict[str, Any]) -> list[Any]:
    moments = state["optimizer"]["state"].values()
    return [*state["model"].values(), *(one for moment in moments for one in moment.values())]


class Words:
    """The other donors, as the rendezvous store tells them."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = list(words)

    def donors(self) -> list[str]:
        """What they said when they met."""
        return self.words


def transport_of(replica: int, state: dict[str, Any], words: Words, bytes_per_s: int | None = None) -> Any:
    from sky_monarch.training.healing import Replicated, Source, StripedTransport

    transport = StripedTransport(
        replica=replica, token=SECRET, address="127.0.0.1", neighbours=words, bytes_per_s=bytes_per_s
    )
    replicated = Replicated(parameters=frozenset(state["model"]), parts=frozenset({"optimizer"}))
    parts: dict[str, Callable[[], Any]] = {key: lambda key=key: state[key] for key in state}  # type: ignore[misc]
    transport.serve(Source(parts=parts, replicated=replicated, step=lambda: STEP, failed=lambda: False))
    return transport


# Donors: each says what is needed to reach it, and ends when it is spoken to.


def ours(pipe: Connection, mib: int, replica: int, bytes_per_s: int | None) -> None:
    state = state_of(mib)
    transport = transport_of(replica, state, Words(), bytes_per_s)
    word = transport.meet(QUORUM)
    transport.send_checkpoint([1], STEP, {"user": state, "torchft": {"step": STEP}}, LIMIT)
    pipe.send((transport.metadata(), word))
    pipe.recv()
    transport.shutdown()


def torchft_http(pipe: Connection, mib: int) -> None:
    from torchft.checkpointing import HTTPTransport

    transport: Any = HTTPTransport(timeout=LIMIT, num_chunks=0)
    transport.send_checkpoint([1], STEP, state_of(mib), LIMIT)
    pipe.send(transport.metadata().replace(socket.gethostname(), "127.0.0.1"))
    pipe.recv()
    transport.shutdown(wait=False)


def _gloo(store: str, rank: int) -> Any:
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=LIMIT)
    group.configure(store, str(rank), rank, 2)
    return group


def torchft_pg(pipe: Connection, mib: int) -> None:
    import torch
    from torch import distributed as dist
    from torchft.checkpointing.pg_transport import PGTransport

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(f"127.0.0.1:{store.port}/bench")
    transport: Any = PGTransport(_gloo(f"127.0.0.1:{store.port}/bench", 0), LIMIT, torch.device("cpu"))
    state = state_of(mib)
    pipe.send(None)
    while pipe.recv():
        transport.send_checkpoint([1], STEP, state, LIMIT)


def raw(pipe: Connection, mib: int) -> None:
    """Where its memory is, and a port at which each connection gets as much of it as it asks for."""
    state = state_of(mib)
    view = memoryview(bytearray(mib << 20))
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.sendall(view[: int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")])

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    places = [(one.data_ptr(), one.nbytes) for one in tensors_of(state)]
    pipe.send((os.getpid(), places, listener.getsockname()))
    pipe.recv()


class Donor:
    """A donor's process."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        self.word = self.hear()

    def hear(self) -> Any:
        """Its next word."""
        if not self.pipe.poll(300):
            raise TimeoutError("a donor does not answer")
        return self.pipe.recv()

    def __enter__(self) -> Donor:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send(None)
        self.process.join(30)
        self.process.kill()


# Joiners: seconds for one state.


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _heal(donors: Sequence[Donor], mine: dict[str, Any]) -> float:
    words = Words([donor.word[1] for donor in donors])
    joiner = transport_of(100, mine, words)
    joiner.meet(QUORUM)
    took_s = _timed(lambda: joiner.recv_checkpoint(0, donors[0].word[0], STEP, LIMIT))
    joiner.shutdown()
    return took_s


def _read(donor: Donor, mine: Sequence[Any], path: str, *, digest: bool) -> float:
    from sky_monarch.actors.rdma import Domain
    from sky_monarch.training.healing.offer import memory_of_leaves

    handle = json.loads(donor.word[1])[3]
    with Domain(SECRET) as domain:
        into = memory_of_leaves(mine)
        return _timed(
            lambda: domain.read_into(
                [handle], into, timeout_s=LIMIT.total_seconds(), path=path, digest=digest
            )
        )


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _raw_cma(donor: Donor, mine: Sequence[Any]) -> float:
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    pid, places, _ = donor.word

    def copy() -> None:
        for one, (address, nbytes) in zip(mine, places, strict=True):
            local, remote = _Vector(one.data_ptr(), nbytes), _Vector(address, nbytes)
            done = readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if done != nbytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

    return _timed(copy)


def _keep_no_pages() -> None:
    """Let each tensor have pages of its own that go back to the kernel with it: else its next one finds them warm."""
    mmap_threshold = -3  # of mallopt(3)
    if not ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20):
        raise OSError("mallopt")


def _raw_pages(mib: int) -> float:
    """Have the kernel give pages that nobody has touched, with a thread for each core."""
    populate_write = 23  # of madvise(2), since Linux 5.14
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    threads_n = os.cpu_count() or 1
    each = (mib << 20) // threads_n // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, each * threads_n) as pages:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))

        def populate(index: int) -> None:
            where = ctypes.c_void_p(address + index * each)
            if madvise(where, ctypes.c_size_t(each), populate_write):
                raise OSError(ctypes.get_errno(), "madvise")

        def all_of_it() -> None:
            with ThreadPoolExecutor(threads_n) as pool:
                list(pool.map(populate, range(threads_n)))

        took_s = _timed(all_of_it)
        gc.collect()  # the view of it
    return took_s


def _raw_tcp(donor: Donor, into: bytearray, streams: int) -> float:
    _, _, address = donor.word
    each = len(into) // streams

    def receive(index: int) -> None:
        view = memoryview(into)[index * each : (index + 1) * each]
        with socket.create_connection(address) as connection:
            connection.sendall(each.to_bytes(8, "little"))
            while view:
                count = connection.recv_into(view)
                if not count:
                    raise ConnectionError("the donor hung up")
                view = view[count:]

    def all_of_it() -> None:
        threads = [threading.Thread(target=receive, args=(index,)) for index in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return _timed(all_of_it)


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def run(arguments: Sequence[str] = ()) -> int:
    """Measure everything, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benches transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(list(arguments))
    mib, rounds = options.mib, options.rounds
    import torch
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing.pg_transport import PGTransport

    _keep_no_pages()
    load = f"{mib} MiB in {3 * _PARTS} tensors"
    gibps: dict[tuple[str, str], list[float]] = {}

    def note(peer: str, figure: str, took_s: float) -> None:
        gibps.setdefault((peer, figure), []).append(mib / 1024 / took_s)

    with (
        Donor(ours, mib, 0, None) as donor,
        Donor(torchft_http, mib) as http,
        Donor(torchft_pg, mib) as group,
    ):
        pg: Any = PGTransport(_gloo(group.word, 1), LIMIT, torch.device("cpu"))
        group.hear()
        http_joiner: Any = HTTPTransport(timeout=LIMIT, num_chunks=0)
        for _ in range(rounds):
            note("sky-monarch", "heal_one_donor_gibps", _heal([donor], state_of(mib, fill=False)))
            fetch = lambda: http_joiner.recv_checkpoint(0, http.word, STEP, LIMIT)  # noqa: E731
            note("torchft-http", "heal_one_donor_gibps", _timed(fetch))
            group.pipe.send(True)
            fetch = lambda: pg.recv_checkpoint(0, "<n/a>", STEP, LIMIT)  # noqa: E731
            note("torchft-pg", "heal_one_donor_gibps", _timed(fetch))
            note("kernel", "fresh_pages_gibps", _raw_pages(mib))
        http_joiner.shutdown(wait=False)

    mine = state_of(mib)
    flat = tensors_of(mine)
    landing = bytearray(mib << 20)
    with Donor(ours, mib, 0, None) as donor, Donor(raw, mib) as limit:
        for _ in range(rounds):
            note("process_vm_readv", "warm_one_host_gibps", _raw_cma(limit, flat))
            note("sky-monarch", "warm_one_host_gibps", _read(donor, flat, "cma", digest=False))
            note("sky-monarch", "warm_one_host_digest_gibps", _read(donor, flat, "cma", digest=True))
            note("loopback", "warm_tcp_gibps", _raw_tcp(limit, landing, 1))
            note("loopback", "warm_tcp_4_streams_gibps", _raw_tcp(limit, landing, 4))
            note("sky-monarch", "warm_tcp_gibps", _read(donor, flat, "tcp", digest=False))
            note("sky-monarch", "warm_tcp_digest_gibps", _read(donor, flat, "tcp", digest=True))
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = _peak_mib()
        _heal([donor], mine)
        extra = _peak_mib() - before
    if float(mine["model"]["layer3"][0]) != 3.0:
        return 1

    throttled = [Donor(ours, mib, replica, THROTTLE) for replica in range(3)]
    try:
        one, three = (_heal(throttled[:count], mine) for count in (1, 3))
    finally:
        for donor in throttled:
            donor.__exit__()

    medians = {key: statistics.median(values) for key, values in gibps.items()}
    for (peer, figure), value in medians.items():
        emit(peer, figure, value, "GiB/s", load=load)

    def ratio(figure: str, other: tuple[str, str], of: str = "") -> None:
        value = medians["sky-monarch", of or figure] / medians[other]
        emit(f"sky-monarch / {other[0]}", f"{of or figure}_ratio", value, "ratio", load=load)

    for peer in ("torchft-http", "torchft-pg"):
        ratio("heal_one_donor_gibps", (peer, "heal_one_donor_gibps"))
    ratio("heal_one_donor_gibps", ("kernel", "fresh_pages_gibps"))
    for figure in ("warm_one_host_gibps", "warm_one_host_digest_gibps"):
        ratio("", ("process_vm_readv", "warm_one_host_gibps"), figure)
    best = max(("warm_tcp_gibps", "warm_tcp_4_streams_gibps"), key=lambda name: medians["loopback", name])
    ratio("", ("loopback", best), "warm_tcp_gibps")
    emit("sky-monarch", "heal_three_donors_ratio", one / three, "ratio", load=f"{load}, 200 MB/s a donor")
    emit("sky-monarch", "joiner_extra_memory_mib", extra, "MiB", load=load)
    return 0
