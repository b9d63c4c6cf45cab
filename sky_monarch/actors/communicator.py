"""Collectives between the devices of several processes, over RCCL or NCCL, each of which ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sky_monarch.actors.actor import Actor, endpoint
from sky_monarch.actors.context import context
from sky_monarch.errors import CommunicatorError, ConfigError

if TYPE_CHECKING:
    from sky_monarch.actors.actor_mesh import ActorMesh

__all__ = ["Communicating", "Communicator", "DeviceBuffer"]

_START_S, _OPERATION_S, _ABORT_S = 120.0, 600.0, 30.0
_SIZES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_MIXED = "one call takes tensors or DeviceBuffers, and not both: they are used on different streams"


class DeviceBuffer:
    """Memory of a device, for programs without torch. Its contents are undefined at first.

    Args:
        nbytes: How long it is, 1 at least.
        dtype: What collectives take it for, as torch names it: ``float32``, ``bfloat16``, ``int32``, ...
        device: Whose memory.

    Raises:
        DeviceError: There is no such device, or no room on it.
        ConfigError: ``nbytes`` or ``dtype`` cannot be used.
    """

    def __init__(self, nbytes: int, *, dtype: str = "uint8", device: int = 0) -> None:
        from sky_monarch import _core

        if dtype not in _SIZES or nbytes % _SIZES[dtype]:
            raise ConfigError(
                f"{nbytes} bytes of {dtype} cannot be exchanged",
                hint=f"whole elements of {', '.join(_SIZES)}",
            )
        self.dtype = dtype
        self._memory = _core.DeviceBuffer(nbytes, device=device)

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where it begins, on the device."""
        return self._memory.address

    def write(self, data: bytes) -> Self:
        """Copy ``data`` to its beginning, and wait; returns itself."""
        self._memory.write(data)
        return self

    def read(self) -> bytes:
        """Copy all of it to the host. Wait for the communicator first: it has a stream of its own."""
        return self._memory.read()


class Communicator:
    """A rank's end of a communicator. Methods put their work on a stream and return; :meth:`wait` waits for it.

    They take :class:`DeviceBuffer` and contiguous tensors of torch on a device; of these the work is put on torch's
    current stream, so that what torch does next there waits for it by itself. Memory is kept until it is done. What
    fails, hangs or loses a rank ends the communicator for good, with all that is under way; where not even that
    ends within ``abort_s``, the process ends itself with exit code 75, and its agent starts another one.

    Args:
        unique_id: What :meth:`new_id` gave one of the ranks; the same for all.
        rank: Which one this is.
        ranks: How many there are.
        device: Index of this process's device.
        start_s: Longest wait for all ranks to come.
        operation_s: Longest time of one piece of work, the wait for ranks that are behind included.
        abort_s: Longest time of an abort.

    Raises:
        NotJoinedError: Not all came in time: nothing is lost, another attempt with another id may succeed.
        DeviceError: There is no such device, or no library for it.
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        unique_id: bytes,
        *,
        rank: int,
        ranks: int,
        device: int = 0,
        start_s: float = _START_S,
        operation_s: float = _OPERATION_S,
        abort_s: float = _ABORT_S,
    ) -> None:
        from sky_monarch import _core

        self._device = device
        self._operation_s = operation_s
        self._streams: set[int | None] = set()
        self._core = _core.Communicator(
            unique_id, rank, ranks, device=device, start_s=start_s, operation_s=operation_s, abort_s=abort_s
        )

    @staticmethod
    def new_id() -> bytes:
        """An id for a new communicator. Who has it and reaches these hosts can join: it is a secret.

        Raises:
            DeviceError: This host has no accelerators, or no library for them.
        """
        from sky_monarch import _core

        return _core.communicator_id()

    @staticmethod
    def connect(mesh: ActorMesh, *, timeout_s: float = _START_S) -> None:
        """Give all actors of a mesh, which are :class:`Communicating`, a communicator among themselves.

        Args:
            mesh: The actors.
            timeout_s: Longest wait for all of them.

        Raises:
            ActorError: One of them could not join.
        """
        first = mesh.slice(**dict.fromkeys(mesh.extent.labels, 0))
        unique_id = first.communicator_id.call_one().get(timeout=timeout_s)
        mesh.join_communicator.call(unique_id, timeout_s).get(timeout=timeout_s + _ABORT_S)

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self._core.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._core.ranks

    def all_reduce(self, data: Any, *, op: str = "sum", out: Any = None) -> None:
        """Reduce ``data`` of all ranks, in place unless ``out`` is given.

        Args:
            data: What this rank adds.
            op: ``sum``, ``prod``, ``max``, ``min`` or ``avg``.
            out: Gets the result; as long as ``data``, of the same type.
        """
        send, dtype, stream = self._memory(data)
        receive = send if out is None else self._like(out, dtype, stream)
        self._core.all_reduce(send, receive, dtype, op, (data, out), stream=stream)

    def broadcast(self, data: Any, *, root: int = 0) -> None:
        """Overwrite ``data`` with that of rank ``root``."""
        memory, dtype, stream = self._memory(data)
        self._core.broadcast(memory, memory, dtype, root, data, stream=stream)

    def all_gather(self, data: Any, out: Any) -> None:
        """Write ``data`` of all ranks to ``out``, one after another in the order of ranks."""
        send, dtype, stream = self._memory(data)
        self._core.all_gather(send, self._like(out, dtype, stream), dtype, (data, out), stream=stream)

    def reduce_scatter(self, data: Any, out: Any, *, op: str = "sum") -> None:
        """Reduce ``data`` of all ranks; ``out`` gets this rank's part of it, in the order of ranks."""
        send, dtype, stream = self._memory(data)
        receive = self._like(out, dtype, stream)
        self._core.reduce_scatter(send, receive, dtype, op, (data, out), stream=stream)

    def send(self, data: Any, to: int) -> None:
        """Send ``data`` to a rank, which receives it."""
        self.exchange(sends={to: data})

    def receive(self, out: Any, source: int) -> None:
        """Receive from a rank, which sends as many bytes."""
        self.exchange(receives={source: out})

    def exchange(
        self, sends: Mapping[int, Any] | None = None, receives: Mapping[int, Any] | None = None
    ) -> None:
        """Send to and receive from several ranks at once: none of it waits for another.

        Args:
            sends: What each of these ranks gets.
            receives: What each of these ranks fills.
        """
        sends, receives = dict(sends or {}), dict(receives or {})
        everything = [self._memory(data) for data in (*sends.values(), *receives.values())]
        streams = {stream for _, _, stream in everything}
        if len(streams) > 1:
            raise ConfigError(_MIXED)
        places = [memory for memory, _, _ in everything]
        to = list(zip(sends, places, strict=False))
        source = list(zip(receives, places[len(sends) :], strict=True))
        self._core.exchange(to, source, (sends, receives), stream=next(iter(streams), None))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until what was put on streams is done.

        Args:
            timeout_s: Longest wait, then the communicator is aborted; by default ``operation_s``.

        Raises:
            CommunicatorError: It is over.
            DeviceError: The device is lost, too.
        """
        for stream in tuple(self._streams) or (None,):
            self._core.wait(self._operation_s if timeout_s is None else timeout_s, stream=stream)
        self._streams.clear()

    def check(self) -> None:
        """Raise where the communicator is over; waits for nothing.

        Raises:
            CommunicatorError: It is.
        """
        if (why := self._core.failure()) is not None:
            raise CommunicatorError(why, hint="make another one, with all ranks that are left")

    def abort(self) -> None:
        """End it, for all ranks: whoever is at something with this one gets an error."""
        self._core.abort()

    def close(self, timeout_s: float = 60.0) -> None:
        """End it in order, as all ranks have to: what is under way is finished before.

        Raises:
            CommunicatorError: It was over already, or did not end in time and was aborted.
        """
        self._core.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _like(self, data: Any, dtype: str, stream: int | None) -> tuple[int, int]:
        memory, own, on = self._memory(data)
        if on != stream:
            raise ConfigError(_MIXED)
        if own != dtype:
            raise ConfigError(f"one side is {dtype} and the other {own}", hint="give both the same type")
        return memory

    def _memory(self, data: Any) -> tuple[tuple[int, int], str, int | None]:
        """Where something lies, its type, and on which stream it is used."""
        if isinstance(data, DeviceBuffer):
            self._streams.add(None)
            return (data.address, data.nbytes), data.dtype, None
        if not hasattr(data, "data_ptr"):
            raise ConfigError(
                f"{type(data).__name__} is no memory of a device",
                hint="give a tensor of torch, or a DeviceBuffer",
            )
        place = data.device
        if place.type != "cuda":  # which ROCm's torch calls its devices, too
            raise ConfigError(
                f"this tensor is on {place}, and a communicator takes memory of devices",
                hint="move it there (`tensor.cuda()`); between tensors of hosts use torch.distributed with gloo",
            )
        if place.index != self._device:
            raise ConfigError(f"this tensor is on {place}, and the communicator's device is {self._device}")
        if not data.is_contiguous():
            raise ConfigError("this tensor is not contiguous", hint="give `tensor.contiguous()`")
        dtype = str(data.dtype).removeprefix("torch.")
        if dtype not in _SIZES:
            raise ConfigError(
                f"elements of type {dtype} cannot be exchanged", hint=f"use {', '.join(_SIZES)}"
            )
        # Whoever has a tensor has loaded torch: it is not loaded for that.
        stream = int(sys.modules["torch"].cuda.current_stream(place.index).cuda_stream)
        self._streams.add(stream)
        return (int(data.data_ptr()), int(data.numel()) * int(data.element_size())), dtype, stream


class Communicating(Actor):
    """An actor that has a communicator with the others of its mesh, once :meth:`Communicator.connect` was called.

    Attributes:
        communicator: The communicator; None before.
    """

    communicator: Communicator | None = None

    @endpoint
    def communicator_id(self) -> bytes:
        """An id for all of them."""
        return Communicator.new_id()

    @endpoint
    def join_communicator(self, unique_id: bytes, timeout_s: float) -> None:
        """Join the others of the mesh that was called. Each process is masked to its own device, number 0."""
        point = context().message_rank
        ranks = prod(point.extent.sizes)
        self.communicator = Communicator(unique_id, rank=point.rank, ranks=ranks, start_s=timeout_s)
