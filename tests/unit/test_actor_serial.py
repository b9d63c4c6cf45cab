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
