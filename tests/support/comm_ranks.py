"""Ranks with a communicator, on the software doubles: ``python -m tests.support.comm_ranks SCENARIO RANK RANKS``.

The id goes from the first one's output to the input of the others, as hexadecimal digits.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

from sky_monarch.actor import Communicating, Communicator, DeviceBuffer, endpoint
from sky_monarch.errors import CommunicatorError, ConfigError, NotJoinedError

Place = namedtuple("Place", ("type", "index"))

FIRST = Place("cuda", 0)


@dataclass
class OnDevice:
    """What a communicator asks of a tensor, for memory of the double: there is no torch that has any there.

    Attributes:
        memory: Where its elements are.
        dtype: As torch prints it.
        contiguous: Whether it is.
        device: Where it is.
    """

    memory: DeviceBuffer
    dtype: str = "torch.float32"
    contiguous: bool = True
    device: Place = FIRST

    def data_ptr(self) -> int:
        return self.memory.address

    def numel(self) -> int:
        return self.memory.nbytes // 4

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return self.contiguous


def floats(*values: float) -> DeviceBuffer:
    return DeviceBuffer(4 * len(values), dtype="float32").write(struct.pack(f"{len(values)}f", *values))


def values(buffer: DeviceBuffer) -> tuple[float, ...]:
    return struct.unpack(f"{buffer.nbytes // 4}f", buffer.read())


class Summing(Communicating):
    """An actor that adds up over its mesh."""

    @endpoint
    def total(self, value: float) -> float:
        assert self.communicator is not None
        buffer = floats(value)
        self.communicator.all_reduce(buffer)
        self.communicator.wait(20)
        return values(buffer)[0]

    @endpoint
    def add_and_die(self) -> None:
        os._exit(3)

    @endpoint
    def failed(self) -> str:
        assert self.communicator is not None
        try:
            reduce_within(self.communicator, 20)
        except CommunicatorError as error:
            return str(error)
        return "it worked"


def reduces(comm: Communicator) -> None:
    mine = comm.rank + 1.0
    total, out = floats(mine, -mine), floats(0, 0)
    comm.all_reduce(total, op="max", out=out)
    whole = floats(*[0] * comm.ranks)
    comm.all_gather(floats(mine), whole)
    part = floats(0)
    comm.reduce_scatter(whole, part, op="avg")
    comm.wait()
    assert values(out) == (comm.ranks, -1.0), values(out)
    assert values(total) == (mine, -mine)
    assert values(whole) == tuple(range(1, comm.ranks + 1))
    comm.wait()
    assert values(part) == (mine,), values(part)
    told = floats(mine)
    comm.broadcast(told, root=1)
    peer = comm.rank ^ 1
    got = floats(0)
    comm.exchange(sends={peer: total}, receives={peer: (both := floats(0, 0))})
    if comm.rank == 0:
        comm.send(told, 1)
    else:
        comm.receive(got, 0)
    comm.wait()
    assert values(told) == (2.0,)
    assert values(both) == (peer + 1.0, -peer - 1.0)
    assert comm.rank == 0 or values(got) == (2.0,)
    comm.check()
    comm.close()
    with pytest.raises(CommunicatorError, match="it was closed"):
        comm.all_reduce(total)


def takes_tensors(comm: Communicator) -> None:
    import torch

    stream = type("Stream", (), {"cuda_stream": 0})
    torch.cuda.current_stream = lambda index: stream  # this torch has no devices, and would ask for them
    tensor = OnDevice(floats(comm.rank + 1.0, 4.0))
    comm.all_reduce(tensor, op="avg")
    comm.wait()
    assert values(tensor.memory) == (1.0, 4.0), values(tensor.memory)
    refused: list[tuple[Any, str]] = [
        (torch.zeros(2), "this tensor is on cpu, and a communicator takes memory of devices"),
        (OnDevice(floats(1), contiguous=False), "not contiguous"),
        (OnDevice(floats(1), device=Place("cuda", 1)), "the communicator's device is 0"),
        (OnDevice(floats(1), dtype="torch.float8_e4m3fnuz"), "float8_e4m3fnuz cannot be exchanged"),
        (bytearray(4), "bytearray is no memory of a device"),
    ]
    for data, why in refused:
        with pytest.raises(ConfigError, match=why):
            comm.all_reduce(data)
    comm.close()


def loses_a_peer(comm: Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(CommunicatorError) as lost:
        reduce_within(comm, 5)
    assert type(lost.value) is CommunicatorError, lost.value
    assert "remote process exited" in str(lost.value), f"nobody watched: {lost.value}"
    with pytest.raises(CommunicatorError) as over:
        comm.check()
    assert "another one" in str(over.value.hint)


def reduce_within(comm: Communicator, limit_s: float) -> None:
    comm.all_reduce(floats(1.0))
    comm.wait(limit_s)


def main() -> None:
    scenario, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if rank == 0:
        unique_id = Communicator.new_id()
        print(unique_id.hex(), flush=True)
    else:
        unique_id = bytes.fromhex(sys.stdin.readline())
    if scenario == "is_alone":
        with pytest.raises(NotJoinedError, match="a rank is missing"):
            Communicator(unique_id, rank=rank, ranks=ranks + 1, start_s=0.3)
        print("done")
        return
    globals()[scenario](Communicator(unique_id, rank=rank, ranks=ranks, start_s=20, operation_s=20))
    print("done")


def replaced_rank() -> None:
    """A rank of a job whose communicator hangs in its first generation, abort and all."""
    operation_s = 20.0
    if os.environ["SKY_MONARCH_GENERATION"] == "1":
        os.environ["SKY_DOUBLE_CCL_FAULT"] = "abort-hang"
        operation_s = 0.3
    comm = Communicator(Communicator.new_id(), rank=0, ranks=1, operation_s=operation_s, abort_s=0.5)
    comm.all_reduce(floats(1.0))
    comm.wait()
    comm.close()


if __name__ == "__main__":
    replaced_rank() if sys.argv[1:] == ["replaced"] else main()
