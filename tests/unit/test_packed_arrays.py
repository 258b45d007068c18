"""The arrays of a message are packed into one: values, objects that Flower transports, and bytes that are none."""

import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyperfl_flwr.protocol.packing import ALIGNMENT, PACKED, PACKED_TYPE, num_arrays, pack_arrays, unpack_arrays

ARRAYS = {
    "group/matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "group/größe": np.array(3, np.int64),
    "empty": np.zeros((0, 2)),
    "long": np.arange(1000, dtype=np.uint32),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "byte": np.array([255], np.uint8),
}


def record_of_bytes(data: bytes, stype: str = PACKED_TYPE, key: str = PACKED) -> ArrayRecord:
    return ArrayRecord({key: Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)})


def filled(part: bytes) -> bytes:
    return part + bytes(-len(part) % ALIGNMENT)


def packed(*parts: tuple[bytes, bytes], number: int | None = None) -> ArrayRecord:
    """Return a record with arrays, each of which is a key and its bytes in numpy's format."""
    head = struct.pack("<Q", len(parts) if number is None else number)
    body = [filled(struct.pack("<QQ", len(key), len(data)) + key) + filled(data) for key, data in parts]
    return record_of_bytes(filled(head) + b"".join(body))


def described(dtype: str = "uint8", shape: tuple[int, ...] = (320,)) -> ArrayRecord:
    """Return an array that Flower would describe in another way than as its bytes."""
    data = pack_arrays({"a": np.ones(1)})[PACKED].data
    assert len(data) == 320
    return ArrayRecord({PACKED: Array(dtype=dtype, shape=shape, stype=PACKED_TYPE, data=data)})


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def header_of(shape: tuple[int, ...], dtype: str = "<f4", *, is_fortran: bool = False) -> bytes:
    stream = io.BytesIO()
    described = {"descr": dtype, "fortran_order": is_fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


ONE = header_of((1,)) + b"\0\0\x80\x3f"


def test_arrays_come_back_unchanged_as_aligned_views_that_cannot_be_written() -> None:
    record = pack_arrays(ARRAYS)
    found = unpack_arrays(record)
    assert list(found) == list(ARRAYS)
    assert num_arrays(record) == len(ARRAYS)
    for key, value in ARRAYS.items():
        np.testing.assert_array_equal(found[key], value, strict=True)
        assert not found[key].flags.writeable
        assert found[key].flags.aligned
    assert {value.ctypes.data % ALIGNMENT for value in found.values()} == {found["long"].ctypes.data % ALIGNMENT}


def test_any_number_of_arrays_travels_as_two_objects() -> None:
    """The array and its bytes, beside the record that holds it and the message's content."""
    many = {f"layer{number}/weight": np.full(10, number, np.float32) for number in range(62)}
    assert len(get_all_nested_objects(RecordDict({"arrays": pack_arrays(many)}))) == 4
    assert len(get_all_nested_objects(RecordDict({"arrays": pack_arrays({"a": np.zeros(3)})}))) == 4


def test_no_arrays_are_an_empty_record() -> None:
    assert len(pack_arrays({})) == 0
    assert unpack_arrays(ArrayRecord()) == {}
    assert num_arrays(ArrayRecord()) == 0


def test_nothing_is_copied_while_arrays_are_read() -> None:
    record = pack_arrays({"large": np.zeros(5_000_000, np.float32), "small": np.zeros(3)})
    tracemalloc.start()
    try:
        found = unpack_arrays(record)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["large"].nbytes == 20_000_000
    assert most < 100_000


def test_what_this_file_writes_by_hand_is_read() -> None:
    """Otherwise the refusals below could have another reason."""
    np.testing.assert_equal(unpack_arrays(packed((b"a", ONE))), {"a": np.ones(1, np.float32)})


@pytest.mark.parametrize(
    "data",
    [
        header_of((2**70,)) + b"0000",
        header_of((2**40, 2**40)) + b"0000",
        header_of((-1,)) + b"0000",
        header_of((2,)) + b"0000",
        header_of((1,)) + b"00000000",
        header_of((1,), "|O") + b"00000000",
        header_of((2, 2), is_fortran=True) + bytes(16),
        header(b"(" * 3000),
        header(b"-" * 9000 + b"1"),
        header(b"\xff\x00"),
        header(b"{[]: 1}"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }".ljust(117) + b"\n") + bytes(4),
        header_of((2**62, 0, 2**62)),
        header_of((2,), "|S0"),
        header_of((2**63,), "|S0"),
        header_of((0, 2**63, 2**63)),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n") + bytes(4),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }# a text".ljust(117) + b"\n") + bytes(4),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1L,), }".ljust(117) + b"\n") + bytes(4),
        header_of((1,) * 100) + bytes(4),
        b"\x93NUMPY\x01\x00\xff\xff{}",
        b"\x93NUMPY\x01\x00",
        b"",
    ],
)
def test_arrays_that_are_none(data: bytes) -> None:
    """Each gives a ValueError; Python's and NumPy's readers raise seven kinds of exceptions, or read too much."""
    with pytest.raises(
        ValueError, match=r"header|must be|must hold|must have|does not fit|magic|EOF|too big|dimension|cannot have"
    ):
        unpack_arrays(packed((b"a", data)))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (record_of_bytes(b""), "8 bytes must follow the first 0"),
        (record_of_bytes(struct.pack("<Q", 0)), "56 bytes must follow the first 8"),
        (packed((b"a", ONE), number=0), "0 arrays must fill"),
        (packed((b"a", ONE), number=2), "2 arrays must fill"),
        (packed((b"a", ONE), (b"b", ONE), number=1), "1 arrays must fill"),
        (packed((b"a", ONE), number=2**64 - 1), "arrays must fill"),
        (packed((b"a", ONE), (b"a", ONE)), "'a' occurs twice"),
        (packed((b"\xff", ONE)), "must be printable UTF-8"),
        (packed((b"a\x01", ONE)), "must be printable UTF-8"),
        (packed((b"a" * 1025, ONE)), "at most 1024 bytes, got 1025"),
        (record_of_bytes(filled(struct.pack("<Q", 1)) + bytes(8)), "16 bytes must follow the first 64"),
        (record_of_bytes(filled(struct.pack("<Q", 1)) + struct.pack("<QQ", 100, 0)), "must follow the first 80"),
        (record_of_bytes(filled(struct.pack("<Q", 1)) + filled(struct.pack("<QQ", 0, 2**64 - 1))), "must follow"),
        (record_of_bytes(filled(struct.pack("<Q", 1)) + filled(struct.pack("<QQ", 1, len(ONE)) + b"a") + ONE), "must"),
        (record_of_bytes(b"\1" + bytes(62) + b"\1"), "only zeros must fill"),
        (packed((b"a", ONE), (b"b", ONE + b"\1")), "the array 'b': .* does not fit"),
        (ArrayRecord({"a": Array(np.zeros(3))}), "arrays must be packed into one, got a record of 1"),
        (record_of_bytes(b"", key="other"), "arrays must be packed into one"),
        (described(dtype="a secret"), "must be described as its 320 bytes, uint8"),
        (described(shape=(1, 2, 3)), "must be described as its 320 bytes, uint8"),
        (record_of_bytes(b"", stype="numpy.ndarray"), "arrays must be packed into one"),
        (ArrayRecord({PACKED: Array(np.zeros(3)), "b": Array(np.zeros(3))}), "got a record of 2"),
    ],
)
def test_records_that_are_not_packed_arrays(record: ArrayRecord, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_arrays(record)


def test_a_shape_of_booleans_is_refused_and_not_remembered() -> None:
    """True equals 1, so that a cache could give either for the other."""
    shape = (True,) * 7
    text = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    with pytest.raises(ValueError, match="must be of integers"):
        unpack_arrays(packed((b"a", header(text) + bytes(2))))
    ones = np.ones((1,) * 7, np.int16)
    np.testing.assert_array_equal(unpack_arrays(pack_arrays({"a": ones}))["a"], ones, strict=True)


def test_no_byte_is_ignored() -> None:
    """A record in which one byte is inverted, also one that only fills, gives other arrays or an error."""
    data = bytearray(pack_arrays(ARRAYS)[PACKED].data)
    unread = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0xFF
        try:
            found = unpack_arrays(record_of_bytes(bytes(changed)))
        except ValueError:
            continue
        unread += list(found) == list(ARRAYS) and all(same(found[key], value) for key, value in ARRAYS.items())
    assert unread == 0


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(st.binary(max_size=300))
def test_any_bytes_are_arrays_or_a_value_error(data: bytes) -> None:
    try:
        found = unpack_arrays(record_of_bytes(data))
    except ValueError:
        return
    assert sum(value.nbytes for value in found.values()) <= len(data)


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 2**20))
def test_damaged_arrays_are_arrays_or_a_value_error(changes: list[tuple[int, int]], end: int) -> None:
    data = bytearray(pack_arrays(ARRAYS)[PACKED].data)
    for position, value in changes:
        data[position % len(data)] = value
    if end % 3 == 0:
        del data[end % len(data) :]
    try:
        found = unpack_arrays(record_of_bytes(bytes(data)))
    except ValueError:
        return
    assert sum(value.nbytes for value in found.values()) <= len(data)
