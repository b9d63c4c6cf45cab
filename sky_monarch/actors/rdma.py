"""Memory of one process that others read and write: a thin face over the Rust core.

A tensor is taken for what it says of itself (``data_ptr()``, ``nbytes``, ``is_contiguous()``), so nothing here
imports torch; everything else is a buffer of Python's, or memory of a device. Where the process's runtime (HIP or
CUDA) knows the memory of a device, RDMA devices reach it by themselves if they can, and else it is staged by that
runtime; any other device's is copied by torch.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sky_monarch.actors.device_memory import Fence, TensorCopies
from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = [
    "Domain",
    "Memory",
    "RDMABuffer",
    "Transfer",
    "domain_of_process",
    "memory_of",
    "memory_of_tensors",
]

_LOCAL_ADDRESS = "127.0.0.1"
_TIMEOUT_S = 30.0
# For copies under way when Python ends.
_LAST_COPIES_S = 5.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Contiguous pieces of memory, and what keeps them valid.

    Attributes:
        segments: Address and length of each.
        owner: Keeps them.
        place: Where they lie, as the core wants to know it; None for memory of this process.
    """

    segments: list[tuple[int, int]]
    owner: object
    place: object = None

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(length for _, length in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was moved.

    Attributes:
        bytes: All of it.
        kept: Of them, those that were there already.
        again: Pieces that had to be moved again.
        owners: For each owner, in order: ``{"bytes", "path", "lost"}``, the last why it was asked for nothing more.
    """

    bytes: int
    kept: int
    again: int
    owners: list[dict[str, Any]]


def memory_of(*objects: object, writable: bool = False) -> Memory:
    """The memory of tensors and buffers, one after the other.

    Args:
        objects: Contiguous tensors, :class:`~sky_monarch.actor.DeviceBuffer`, or buffers (``bytes``, numpy's, …).
        writable: Whether it is to be written to.

    Raises:
        ConfigError: One has no memory, is not contiguous, or is read-only; or a tensor of a device comes with something
            that is no tensor.
    """
    tensors: list[Any] = [one for one in objects if hasattr(one, "data_ptr")]
    for tensor in tensors:
        _check(tensor)
    if any(_device_of(tensor) != "cpu" for tensor in tensors):
        if len(tensors) < len(objects):
            raise ConfigError("tensors of a device come alone", hint="pass tensors, or buffers")
        return memory_of_tensors(tensors)
    segments: list[tuple[int, int]] = []
    kept: list[object] = []
    places: set[object] = set()
    one: Any
    for one in objects:
        if hasattr(one, "data_ptr"):
            segments.append((int(one.data_ptr()), int(one.nbytes)))
        elif hasattr(one, "address") and hasattr(one, "nbytes"):  # a DeviceBuffer
            segments.append((int(one.address), int(one.nbytes)))
            places.add("device")
        else:
            segment, one = _of_buffer(one, writable=writable)  # with the view that holds it
            segments.append(segment)
        kept.append(one)
    return Memory(segments, tuple(kept), next(iter(places), None))


def memory_of_tensors(tensors: Sequence[Any], fence: Fence | None = None) -> Memory:
    """The memory of tensors without gaps, on whatever devices.

    Args:
        tensors: Without gaps.
        fence: When they hold what they are to; None for now. Waited for here where anybody but torch copies them.

    Raises:
        DeviceError: A device hangs.
    """
    from sky_monarch import _core

    if all(one.device.type == "cpu" for one in tensors):
        return Memory([(one.data_ptr(), one.nbytes) for one in tensors], tensors)
    remote = [one for one in tensors if one.device.type != "cpu" and one.nbytes]
    fence = Fence({one.device for one in remote}) if fence is None else fence
    # What torch calls AMD's devices, too.
    if all(one.device.type == "cuda" and _core.is_device_memory(one.data_ptr()) for one in remote):
        fence.wait()
        return Memory([(one.data_ptr(), one.nbytes) for one in tensors], tensors, "device")
    return carried(tensors, fence)


def carried(tensors: Sequence[Any], fence: Fence | None = None) -> Memory:
    """The same, copied by torch."""
    if fence is not None:
        fence.wait_for_plain()
    # Only the length counts: these are no addresses.
    return Memory([(1, sum(int(one.nbytes) for one in tensors))], tensors, TensorCopies(tensors, fence))


def _device_of(tensor: Any) -> str:
    device = getattr(tensor, "device", "cpu")
    return str(getattr(device, "type", device))


def _check(tensor: Any) -> None:
    if not tensor.is_contiguous():
        raise ConfigError("a tensor is not contiguous", hint="pass tensor.contiguous(), and copy back")
    if _device_of(tensor) == "meta":
        raise ConfigError("a tensor lies on meta: it has no memory")


def _of_buffer(one: object, *, writable: bool) -> tuple[tuple[int, int], object]:
    from sky_monarch import _core

    try:
        view = memoryview(one)  # type: ignore[arg-type]
        return _core.buffer_segment(view, writable), (view, one)
    except (TypeError, BufferError) as error:
        raise ConfigError(
            f"a {type(one).__name__} cannot be {'written' if writable else 'read'} by others: {error}",
            hint="pass a contiguous tensor, or an object with a contiguous buffer",
        ) from error


_open: weakref.WeakSet[Domain] = weakref.WeakSet()
_ends: set[int] = set()


def _end(pid: int) -> None:
    """Have the core out of Python before it ends: a thread that is copying for a peer then would abort the process."""
    from sky_monarch import _core

    if os.getpid() == pid:
        _core.end_carriers(_LAST_COPIES_S)
        for domain in list(_open):
            domain.close()


class Domain:
    """A process's place among those that share memory; used by any thread, closed at the end.

    Args:
        secret: Of the run: who cannot prove that it has it is refused.
        address: Numeric, where peers reach this process.
        bytes_per_s: What may leave in all. With a limit peers may not read by themselves.

    Raises:
        ConfigError: The address or the secret cannot be used.
        SystemCallError: The operating system said no.
    """

    def __init__(self, secret: str, *, address: str = _LOCAL_ADDRESS, bytes_per_s: int | None = None) -> None:
        from sky_monarch import _core

        self._core = _core.RdmaDomain(address, secret, bytes_per_s=bytes_per_s)
        _open.add(self)
        if os.getpid() not in _ends:
            _ends.add(os.getpid())
            atexit.register(_end, os.getpid())

    @property
    def address(self) -> str:
        """Where peers ask: ``<address>:<port>``."""
        return self._core.address

    def register(self, memory: Memory, *, epoch: int = 0, writable: bool = False) -> str:
        """Let peers reach ``memory``; returns its handle, a text.

        Raises:
            FrameTooLargeError: Too much is registered already.
        """
        return self._core.register(
            memory.segments, memory.owner, epoch=epoch, writable=writable, place=memory.place
        )

    def deregister(self, handle: str, *, timeout_s: float) -> bool:
        """Let nobody reach it any more, and wait for who is just doing so.

        Returns:
            Whether readers had to be revoked: what they have read does not count.

        Raises:
            ChannelTimeoutError: Something may still be written to it; it stays alive until that has ended.
        """
        return self._core.deregister(handle, timeout_s)

    def announce(self, name: str, serial: int, text: str) -> None:
        """Let peers find ``text`` by ``name`` and ``serial``.

        Raises:
            StaleHandleError: ``serial`` was retracted.
            FrameTooLargeError: It exceeds its bound.
        """
        self._core.announce(name, serial, text)

    def retract(self, serial: int) -> None:
        """Take back what was announced up to ``serial``, for good."""
        self._core.retract(serial)

    def lookup(self, address: str, name: str, serial: int, *, timeout_s: float) -> str:
        """What the domain at ``address`` has announced, or announces in time.

        Raises:
            StaleHandleError: It has gone on.
            ChannelTimeoutError: It has announced nothing.
            ChannelClosedError: It is gone.
            PeerRefusedError: It does not belong to this run.
        """
        return self._core.lookup(address, name, serial, timeout_s)

    def read_into(
        self,
        handles: Sequence[str],
        into: Memory,
        *,
        timeout_s: float,
        offset: int = 0,
        digest: bool = True,
        keep: bool = False,
        path: str | None = None,
        streams: int | None = None,
    ) -> Transfer:
        """Fill ``into`` from owners that hold the same bytes; the first decides what they are.

        Args:
            handles: Of the owners. A piece that one does not give, or gives wrong, is read from another.
            into: To be filled; after an error its content is undefined.
            timeout_s: For all of it.
            offset: Where the bytes begin in the owners' memory.
            digest: Whether each piece is checked.
            keep: Whether a piece is left as it is where its digest is that of the first owner.
            path: ``cma``, ``shm``, ``ibverbs`` or ``tcp``; None for the best.
            streams: Threads for each owner; None for what is usual.

        Raises:
            TransferError: See there; with several owners, of the first that was lost.
            ChannelClosedError: The owner is gone.
            ChannelTimeoutError: ``timeout_s`` is over, or the owner hangs.
            PeerRefusedError: It does not belong to this run.
            SystemCallError: ``path`` does not lead there.
        """
        report = self._core.read_into(
            list(handles),
            into.segments,
            into.owner,
            timeout_s=timeout_s,
            offset=offset,
            digest=digest,
            keep=keep,
            path=path,
            streams=streams,
            place=into.place,
        )
        return Transfer(**report)

    def write_from(
        self,
        handle: str,
        source: Memory,
        *,
        timeout_s: float,
        offset: int = 0,
        digest: bool = True,
        path: str | None = None,
    ) -> Transfer:
        """Write ``source`` to an owner. After an error the range there is undefined. Raises as :meth:`read_into`."""
        report = self._core.write_from(
            handle,
            source.segments,
            source.owner,
            timeout_s=timeout_s,
            offset=offset,
            digest=digest,
            path=path,
            place=source.place,
        )
        return Transfer(**report)

    def close(self) -> None:
        """Withdraw everything and hang up. Does nothing the second time."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RDMABuffer:
    """Memory of one process that others read and write; as Monarch's.

    The process that makes it owns the memory. Pickled, it is a handle: sent to another process of the run, its
    calls work there, whatever way the bytes take.

    Args:
        data: A contiguous tensor, memory of a device, or an object with a contiguous buffer. It is kept alive until
            :meth:`drop`, and beyond for as long as somebody uses it. What a device is to do with it is waited for here;
            before others are to read what is written later, synchronize.
        domain: Where it is registered; None for that of the process.
        epoch: Of the owner's choice: once it has registered the memory anew under another, this handle is stale.
        writable: Whether others may write to it.

    Raises:
        ConfigError: ``data`` cannot be registered.
    """

    def __init__(
        self, data: object, *, domain: Domain | None = None, epoch: int = 0, writable: bool = True
    ) -> None:
        memory = memory_of(data, writable=writable)
        self._domain = domain or domain_of_process()
        self._nbytes = memory.nbytes
        shared = _shared(data)
        if shared is not None:
            memory = Memory(memory.segments, shared, memory.place)
        self._handle = self._domain.register(memory, epoch=epoch, writable=writable)

    @classmethod
    def of_handle(cls, handle: str, nbytes: int, domain: Domain | None = None) -> RDMABuffer:
        """The buffer of another process.

        Args:
            handle: Its :attr:`handle`.
            nbytes: Its :meth:`size`.
            domain: Of this process; None for the usual one.
        """
        buffer = cls.__new__(cls)
        buffer._domain, buffer._handle, buffer._nbytes = domain or domain_of_process(), handle, nbytes
        return buffer

    @property
    def handle(self) -> str:
        """Where others find it, as text."""
        return self._handle

    def size(self) -> int:
        """Its length in bytes."""
        return self._nbytes

    def read_into(
        self,
        dst: object,
        *,
        offset: int = 0,
        timeout: float = _TIMEOUT_S,
        path: str | None = None,
        digest: bool = True,
    ) -> Transfer:
        """Read it into local memory.

        Args:
            dst: A contiguous tensor, memory of a device, or a writable buffer, of the length that is wanted.
            offset: Where in this buffer its bytes begin.
            timeout: Seconds for all of it.
            path: ``cma``, ``shm``, ``ibverbs`` or ``tcp``; None for the best that leads there.
            digest: Whether what arrives is checked.

        Raises:
            OutOfBoundsError: The range is not inside.
            StaleHandleError: The owner has withdrawn it.
            DigestError: What arrived is not what is there.
            ChannelClosedError: The owner is gone.
            ChannelTimeoutError: ``timeout`` is over, or the owner hangs.
        """
        into = memory_of(dst, writable=True)
        return self._domain.read_into(
            [self._handle], into, timeout_s=timeout, offset=offset, path=path, digest=digest
        )

    def write_from(
        self,
        src: object,
        *,
        offset: int = 0,
        timeout: float = _TIMEOUT_S,
        path: str | None = None,
        digest: bool = True,
    ) -> Transfer:
        """Write local memory into it; after an error its range is undefined.

        Raises:
            AccessForbiddenError: Its owner lets nobody write. Otherwise as :meth:`read_into`.
        """
        return self._domain.write_from(
            self._handle, memory_of(src), timeout_s=timeout, offset=offset, path=path, digest=digest
        )

    def drop(self, *, timeout: float = _TIMEOUT_S) -> None:
        """Let nobody use it any more, in the process that owns it; elsewhere forget it. May be said twice.

        Args:
            timeout: Seconds to wait for who is just using it; readers are then revoked.

        Raises:
            ChannelTimeoutError: Somebody is still writing to it. The memory stays alive until that has ended.
        """
        self._domain.deregister(self._handle, timeout_s=timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return RDMABuffer.of_handle, (self._handle, self._nbytes)

    def __repr__(self) -> str:
        return f"RDMABuffer({self._nbytes} bytes)"


def _shared(data: object) -> object | None:
    from sky_monarch import _core

    return data if isinstance(data, _core.SharedBuffer) else None


def _secret_of_mesh() -> str | None:
    """That of the actors of this process, where it has some."""
    import hashlib
    import sys

    actors = sys.modules.get("sky_monarch.actors.runtime")
    found = None if actors is None else actors._runtime
    if found is None or found.pid != os.getpid():
        return None
    # Not the same one: who is told this proves nothing to the mesh.
    return hashlib.sha256(f"memory of {found.token}".encode()).hexdigest()


_process: list[tuple[int, Domain]] = []
_process_lock = threading.Lock()


def domain_of_process() -> Domain:
    """The domain that buffers belong to where none is given, made when first needed.

    In a run its secret is the run's, and in a program with actors the mesh's, so that all its processes reach each
    other. Elsewhere processes that are to share memory need one in common, in ``SKY_MONARCH_TOKEN``.
    """
    with _process_lock:
        if not _process or _process[0][0] != os.getpid():
            secret = _secret_of_mesh() or os.environ.get("SKY_MONARCH_TOKEN") or secrets.token_hex(32)
            address = os.environ.get("SKY_MONARCH_ADDRESS") or _LOCAL_ADDRESS
            _process[:] = [(os.getpid(), Domain(secret, address=address))]
        return _process[0][1]
