"""Tensors whose memory the host cannot follow: torch copies them, in pieces, to where it can.

Where a device has streams, the copies are put on streams beside the script's, which wait on the device for what the
script had queued (:class:`Fence`). No wait here is without an end: a device that hangs is named.

Nothing here imports torch: whoever has a tensor has loaded it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sky_monarch.errors import DeviceError

__all__ = ["Fence", "TensorCopies"]

logger = logging.getLogger(__name__)

# A device that is not done with a step, or with a copy of a few MiB, in this time hangs.
_LIMIT_S = 30.0
# Between two looks: a copy takes some 100 microseconds. The device's own wait would not end when it hangs.
_FIRST_LOOK_S, _LAST_LOOK_S = 50e-6, 2e-3
_STREAMS = ("Stream", "stream", "current_stream")

# By device, those that nobody puts anything on; as many as there were copies at a time.
_idle: dict[Any, list[Any]] = {}
# What a device that was given up may still write to.
_abandoned: list[object] = []


def _module_of(device: Any) -> Any:
    """Torch's module of an accelerator; None where it has none."""
    if device.type == "cpu":
        return None
    try:
        return sys.modules["torch"].get_device_module(device)
    except RuntimeError:
        return None


def _has_streams(module: Any) -> bool:
    return all(hasattr(module, name) for name in _STREAMS)


def _wait(event: Any, device: Any) -> None:
    began_s, look_s = time.monotonic(), _FIRST_LOOK_S
    while not event.query():
        if time.monotonic() - began_s > _LIMIT_S:
            raise DeviceError(f"{device} is not done after {_LIMIT_S:.0f} s: it hangs")
        time.sleep(look_s)
        look_s = min(2 * look_s, _LAST_LOOK_S)


def _synchronize(module: Any, device: Any) -> None:
    """Of a device without streams, which offers nothing that could be polled."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            module.synchronize(device)
        except Exception as error:  # noqa: BLE001  # raised below
            errors.append(error)

    waiting = threading.Thread(target=run, name="device-synchronize", daemon=True)
    waiting.start()
    waiting.join(_LIMIT_S)
    if waiting.is_alive():
        raise DeviceError(f"{device} is not done after {_LIMIT_S:.0f} s: it hangs")
    if errors:
        raise DeviceError(f"{device} cannot be waited for: {errors[0]}")


class Fence:
    """What was queued on devices at a moment, by the thread that says so.

    Args:
        devices: Which.
        before: Of another moment, which counts as well.
    """

    def __init__(self, devices: Iterable[Any] = (), before: Fence | None = None) -> None:
        self._events: list[tuple[Any, Any]] = [] if before is None else [*before._events]
        self._plain: dict[Any, Any] = {} if before is None else dict(before._plain)
        for device in set(devices):
            module = _module_of(device)
            if module is not None and _has_streams(module):
                self._events.append((device, module.current_stream(device).record_event()))
            elif hasattr(module, "synchronize"):
                self._plain[device] = module

    def block(self, stream: Any, device: Any) -> None:
        """Let what is put on ``stream`` of ``device`` from now on come after it; does not wait here."""
        for where, event in self._events:
            if where == device:
                stream.wait_event(event)

    def block_this_thread(self) -> None:
        """Let what this thread queues from now on come after it."""
        for device, event in self._events:
            _module_of(device).current_stream(device).wait_event(event)

    def wait_for_plain(self) -> None:
        """Wait for the devices that have no streams.

        Raises:
            DeviceError: One hangs.
        """
        for device, module in self._plain.items():
            _synchronize(module, device)
        self._plain = {}

    def wait(self) -> None:
        """Wait until all of it is done: what others then read without torch is what was written.

        Raises:
            DeviceError: A device hangs.
        """
        self.wait_for_plain()
        for device, event in self._events:
            _wait(event, device)


class TensorCopies:
    """The bytes of tensors, one after the other, as the core copies what it cannot get at itself.

    Whatever kind of device they are on, ``copy_`` moves them: in pieces, where the device has streams on one that no
    other thread is using, so that a transfer does not wait for the steps that are computed meanwhile.

    Args:
        tensors: Without gaps. Of several devices, and of the host, if need be.
        fence: When they hold what they are to; None for now.
    """

    def __init__(self, tensors: Sequence[Any], fence: Fence | None = None) -> None:
        self._torch: Any = sys.modules["torch"]
        self._flat = [self._bytes_of(one) for one in tensors if one.nbytes]
        self._starts = [0, *itertools.accumulate(int(one.nbytes) for one in self._flat)]
        devices = {one.device for one in self._flat}
        self._fence = Fence(devices) if fence is None else fence
        self._pinned = any(_has_streams(_module_of(device)) for device in devices)

    def _bytes_of(self, tensor: Any) -> Any:
        # Unlike of `detach()`, autograd does not count changes of `data`: a backward pass under way may go on, as with
        # memory of the host.
        whole = tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return whole.view(self._torch.uint8)

    def room(self, nbytes: int) -> tuple[int, object]:
        """Memory of the host, pinned where there is a device that it could be pinned for and the host has such."""
        room = None
        if self._pinned:
            try:
                room = self._room(nbytes, pin_memory=True)
            except RuntimeError as error:
                logger.warning("copies of a device go through memory that is not pinned: %s", error)
        if room is None:
            room = self._room(nbytes)
        return int(room.data_ptr()), room

    def _room(self, nbytes: int, **options: Any) -> Any:
        torch = self._torch
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", **options)

    def fetch(self, offset: int, address: int, nbytes: int) -> None:
        """Copy from the tensors, ``offset`` being counted in all of them, to memory of the host.

        Raises:
            DeviceError: The device hangs.
        """
        self._copy(offset, address, nbytes, to_host=True)

    def store(self, offset: int, address: int, nbytes: int) -> None:
        """The other way."""
        self._copy(offset, address, nbytes, to_host=False)

    def _copy(self, offset: int, address: int, nbytes: int, *, to_host: bool) -> None:
        torch = self._torch
        host = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        index, done = bisect.bisect_right(self._starts, offset) - 1, 0
        used: dict[Any, Any] = {}
        try:
            with torch.no_grad():
                while done < nbytes:
                    there = self._flat[index][offset + done - self._starts[index] :][: nbytes - done]
                    here = host[done : done + there.nbytes]
                    self._put(here if to_host else there, there if to_host else here, there.device, used)
                    done += int(there.nbytes)
                    index += 1
            for device, stream in used.items():
                _wait(stream.record_event(), device)
        except BaseException:
            # What was queued may still be under way: neither these tensors nor their streams may be anything else's.
            _abandoned.extend([self, used] if used else [])
            raise
        for device, stream in used.items():
            _idle.setdefault(device, []).append(stream)

    def _put(self, target: Any, source: Any, device: Any, used: dict[Any, Any]) -> None:
        module = _module_of(device)
        if not _has_streams(module):
            target.copy_(source)
            return
        if device not in used:
            used[device] = self._stream(module, device)
        with module.stream(used[device]):
            target.copy_(source, non_blocking=True)

    def _stream(self, module: Any, device: Any) -> Any:
        try:
            stream = _idle.setdefault(device, []).pop()
        except IndexError:
            stream = module.Stream(device=device)
        self._fence.block(stream, device)
        return stream
