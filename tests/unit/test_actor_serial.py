"""What of a value travels beside its body, and that it comes out as it went in."""

from __future__ import annotations

from typing import Any

import pytest

from sky_monarch._core import actor_bytes
from sky_monarch.actors import serial

LARGE = serial.INLINE
BYTES = bytes(range(256)) * (LARGE // 256)


def there_and_back(value: Any) -> tuple[Any, int]:
    """What comes out, and how long its body was."""
    body, buffers = serial.dump_result(value)
    # As they arrive: writable copies, or shared memory.
    return serial.loads(body, [bytearray(one) for one in buffers or ()]), len(body)


@pytest.mark.parametrize(
    "value",
    [
        BYTES,
        bytearray(BYTES),
        [BYTES, "small", bytearray(BYTES)],
        (1, BYTES),
        {"weights": BYTES, "step": 3},
    ],
    ids=["bytes", "bytearray", "list", "tuple", "dict"],
)
def test_large_bytes_travel_beside_the_body_and_come_out_as_they_were(value):
    found, length = there_and_back(value)

    assert found == value
    assert type(found) is type(value)
    assert length < 1000, "they are not in the body, too"
    if isinstance(value, list):
        assert [type(one) for one in found] == [bytes, str, bytearray]


def test_arguments_of_a_call_by_place_and_by_name_do_so_too():
    body, buffers = serial.dump_call((BYTES,), {"more": bytearray(BYTES)})

    assert len(body) < 1000
    assert buffers is not None
    assert serial.loads(body, [bytearray(one) for one in buffers]) == ((BYTES,), {"more": bytearray(BYTES)})


@pytest.mark.parametrize("value", [b"", BYTES[:-1], bytearray(b"x"), [b"small"], {}])
def test_what_is_small_is_part_of_the_body(value):
    body, buffers = serial.dump_result(value)

    assert buffers is None
    assert serial.loads(body) == value


@pytest.mark.parametrize("length", [0, 1, 4 << 20, (17 << 20) + 3])
def test_bytes_of_a_buffer_are_copied_whole_whatever_their_length(length):
    source = memoryview(bytearray((BYTES * (length // len(BYTES) + 1))[:length]))

    found = actor_bytes(source)

    assert type(found) is bytes
    assert found == source
    if length:
        source[0] ^= 255
        assert found != source, "a copy"


def test_a_buffer_with_gaps_is_refused():
    with pytest.raises(BufferError, match="not contiguous"):
        actor_bytes(memoryview(bytearray(10))[::2])


def tensors() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    plain = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)
    return {
        "plain": plain,
        "transposed": plain.t(),
        "with gaps": plain[:, ::3],
        "a row of many": plain.repeat(100, 1)[5:7000],
        "bfloat16": plain.bfloat16(),
        "eight bits": plain.repeat(2, 1).to(torch.float8_e4m3fn),
        "few of eight bits": torch.ones(3, 2).to(torch.float8_e4m3fn),
        "complex": torch.complex(plain, plain),
        "bool": plain.repeat(2, 1) > 3,
        "with a gradient": plain.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(plain.clone()),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "transposed",
        "with gaps",
        "a row of many",
        "bfloat16",
        "eight bits",
        "few of eight bits",
        "complex",
        "bool",
        "with a gradient",
        "parameter",
    ],
)
def test_a_tensor_travels_beside_the_body_and_comes_out_as_it_was(kind):
    torch = pytest.importorskip("torch")
    tensor = tensors()[kind]
    found, length = there_and_back({"weights": [tensor]})
    found = found["weights"][0]

    assert length < 1000, "it is not in the body, too"
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    assert torch.equal(found.detach().to(torch.complex64), tensor.detach().to(torch.complex64))
    if kind != "with gaps":
        assert found.stride() == tensor.stride()
    assert found.is_leaf
    assert not found._is_view()
    with torch.no_grad():
        found.zero_()
    assert tensor.detach().to(torch.complex64).abs().sum() > 0, "a copy"


def test_tensors_that_are_more_than_their_bytes_go_torchs_way():
    torch = pytest.importorskip("torch")
    plain = torch.arange(60_000, dtype=torch.float32)
    hooked = plain.clone().requires_grad_()
    hooked.name_of_it = "weights"
    for tensor in (
        plain[:3].expand(30_000, 3),
        torch.zeros(0, 5),
        torch.complex(plain, plain).conj(),
        torch.eye(200).to_sparse(),
        torch.ones(20_000, device="meta"),
        hooked,
    ):
        found, _ = there_and_back(tensor)
        assert (found.shape, found.layout, found.device) == (tensor.shape, tensor.layout, tensor.device)
        assert found.is_conj() == tensor.is_conj()
        assert vars(found) == vars(tensor)
        if tensor.device.type != "meta":
            assert torch.equal(found.to_dense(), tensor.to_dense())


def test_tensors_of_what_goes_by_value_travel_beside_it_too():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(60_000)

    def function() -> Any:
        return tensor

    found, length = there_and_back(function)
    assert torch.equal(found(), tensor)
    assert length < 5000
