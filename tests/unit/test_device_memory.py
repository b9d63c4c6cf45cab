"""What is done with the streams of a device that has some: on a double of torch's module, in memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from sky_monarch.errors import DeviceError

pytestmark = pytest.mark.torch


class Streams:
    """A module such as ``torch.cuda`` that writes down what it is told."""

    def __init__(self, looks: int = 3) -> None:
        self.log: list[str] = []
        self.made = 0
        self.looks = looks

    def Stream(self, device: Any) -> Any:  # noqa: N802  # torch's name
        self.made += 1
        return Stream(self, f"side{self.made}")

    def current_stream(self, device: Any) -> Any:
        return Stream(self, f"script on {device}")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"copy on {stream.name}")
        yield


class Stream:
    def __init__(self, module: Streams, name: str) -> None:
        self.module, self.name = module, name

    def record_event(self) -> Any:
        self.module.log.append(f"record {self.name}")
        return Event(self.module, self.name)

    def wait_event(self, event: Any) -> None:
        self.module.log.append(f"{self.name} after {event.name}")


class Event:
    def __init__(self, module: Streams, name: str) -> None:
        self.module, self.name, self.left = module, name, module.looks

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.module.log.append(f"{self.name} is done")
        return self.left <= 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    from sky_monarch.actors import device_memory

    made = Streams()
    monkeypatch.setattr(device_memory, "_module_of", lambda device: made)
    monkeypatch.setattr(device_memory, "_idle", {})
    monkeypatch.setattr(device_memory, "_abandoned", [])
    return made


def test_copies_go_beside_the_script_and_after_what_it_had_queued(streams: Streams) -> None:
    import torch

    from sky_monarch.actors.device_memory import Fence, TensorCopies

    tensor = torch.arange(6.0)
    copies = TensorCopies([tensor], Fence([tensor.device]))
    buffer = torch.zeros(2)
    copies.fetch(4, buffer.data_ptr(), 8)
    assert buffer.tolist() == [1.0, 2.0]
    assert streams.log == [
        "record script on cpu",
        "side1 after script on cpu",
        "copy on side1",
        "record side1",
        "side1 is done",
    ]
    copies.store(16, buffer.data_ptr(), 8)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    assert streams.made == 1, "the same stream again"


def test_no_two_threads_are_on_one_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sky_monarch.actors.device_memory import TensorCopies

    # No copy is done before all of them are under way.
    all_copy = threading.Barrier(3, timeout=20)
    monkeypatch.setattr(Event, "query", lambda event: all_copy.wait() >= 0)
    copies = TensorCopies([torch.zeros(4)])
    buffers = [torch.zeros(4) for _ in range(3)]
    threads = [threading.Thread(target=copies.fetch, args=(0, one.data_ptr(), 16)) for one in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not all_copy.broken, "they wait for each other"
    assert streams.made == 3


def test_a_device_that_hangs_is_given_up_and_nothing_of_the_copy_used_again(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sky_monarch.actors import device_memory

    tensor = torch.zeros(4)
    copies = device_memory.TensorCopies([tensor])
    buffer = ctypes.create_string_buffer(16)
    monkeypatch.setattr(device_memory, "_LIMIT_S", 0.01)
    streams.looks = 10**9
    with pytest.raises(DeviceError, match="it hangs"):
        copies.fetch(0, ctypes.addressof(buffer), 16)
    with pytest.raises(DeviceError, match="it hangs"):
        device_memory.Fence([tensor.device]).wait()
    assert copies in device_memory._abandoned, "its tensors are kept"
    streams.looks = 1
    copies.fetch(0, ctypes.addressof(buffer), 16)
    assert streams.made == 2


def test_a_device_without_streams_that_hangs_is_given_up(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sky_monarch.actors import device_memory

    ends, seen = threading.Event(), []

    def synchronize(device: Any) -> None:
        seen.append(device)
        ends.wait(10)

    plain = types.SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(device_memory, "_module_of", lambda device: plain)
    monkeypatch.setattr(device_memory, "_LIMIT_S", 0.01)
    fence = device_memory.Fence([torch.device("cpu")])
    with pytest.raises(DeviceError, match="it hangs"):
        fence.wait()
    ends.set()
    monkeypatch.setattr(device_memory, "_LIMIT_S", 10)
    fence.wait()
    fence.wait()
    assert len(seen) == 2, "what is done is waited for once"


def test_a_fence_holds_what_came_before_it(streams: Streams) -> None:
    import torch

    from sky_monarch.actors.device_memory import Fence

    device = torch.device("cpu")
    Fence([device], Fence([device])).block(streams.Stream(device), device)
    assert streams.log == [*["record script on cpu"] * 2, *["side1 after script on cpu"] * 2]


def test_all_devices_of_a_state_are_waited_for(streams: Streams) -> None:
    """A model whose layers lie on several devices of one process."""
    import torch

    from sky_monarch.training.healing import Replicated, Source, StripedTransport

    transport = StripedTransport(replica=0, token="the secret", address="127.0.0.1", neighbours=Alone())
    try:
        parts = {"model": lambda: {"a": torch.zeros(2)}}
        replicated = Replicated(parameters=frozenset({"a"}))
        transport.serve(Source(parts=parts, replicated=replicated, step=lambda: 0, failed=lambda: False))
        assert streams.log == ["record script on cpu"]
        # Moments of a layer that is elsewhere, after the first step.
        moment: Any = types.SimpleNamespace(device=torch.device("cuda:1"))
        transport._know([moment])
        streams.log.clear()
        transport.settle()
        assert sorted(streams.log) == ["record script on cpu", "record script on cuda:1"]
    finally:
        transport.shutdown()


class Alone:
    """No neighbours."""

    def donors(self) -> list[str]:
        return []


def test_where_memory_cannot_be_pinned_another_one_does(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from sky_monarch.actors.device_memory import TensorCopies

    copies, empty = TensorCopies([torch.zeros(4)]), torch.empty

    def refusing(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        if pin_memory:
            raise RuntimeError("the limit of locked memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    address, room = copies.room(8)
    assert isinstance(room, torch.Tensor)
    assert (room.data_ptr(), room.nbytes) == (address, 8)
    assert "not pinned: the limit of locked memory" in caplog.text


def test_a_tensor_that_lies_in_another_order_is_copied_as_it_lies() -> None:
    import torch

    from sky_monarch.actors.device_memory import TensorCopies

    buffer = ctypes.create_string_buffer(24)
    TensorCopies([torch.arange(6.0).view(2, 3).t()]).fetch(0, ctypes.addressof(buffer), 24)
    assert bytes(buffer) == torch.arange(6.0).numpy().tobytes()


def test_a_backward_pass_under_way_may_go_on_while_its_parameters_are_written() -> None:
    import torch

    from sky_monarch.actors.device_memory import TensorCopies

    parameter = torch.nn.Parameter(torch.ones(4))
    loss = (parameter * parameter).sum()
    new = torch.full((4,), 3.0)
    TensorCopies([parameter]).store(0, new.data_ptr(), 16)
    loss.backward()
    assert parameter.tolist() == [3.0] * 4
