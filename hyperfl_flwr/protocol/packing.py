"""Pack the named arrays of a Flower message into one, read them without a copy, and refuse bytes that are none."""

import functools
import io
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.core.files.checked_files import read_header
from hyperfl_flwr.protocol.arrays import SharedArrays, per_client_key
from hyperfl_flwr.protocol.messages import printable

PACKED = "packed"
"""Key in a record of the array into which all others are packed."""

PACKED_TYPE = "hyperfl.packed"
"""Name of its format, in the place where Flower names that of a serialised array."""

ALIGNMENT = 64
"""Bytes, a multiple of which each part of a packed array takes, so that the elements are aligned in memory."""

NUM_ARRAYS = struct.Struct("<Q")
"""First part of a packed array: the number of arrays."""

LENGTHS = struct.Struct("<QQ")
"""Beginning of each array in a packed one: the sizes in bytes of its key and of the array in numpy's format."""

MOST_NAME = 1024
"""Maximum size in bytes of the key of a received array; keys of this project have less than a hundred characters."""

MOST_HEADER = 512
"""Maximum size in bytes of the header of a received array; `pack_arrays` writes about a hundred."""


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack arrays into a record with a single array; copies each array once.

    Flower transports each array of a record as two or more objects, and each object costs the SuperLink two requests of
    several milliseconds, whatever its size.

    The packed array is the number of arrays, and for each array the sizes of its key and of its bytes, the key (UTF-8),
    and the array in numpy's format 1.0; zeros fill each part up to a multiple of `ALIGNMENT`. A record without arrays
    is empty.
    """
    if not arrays:
        return ArrayRecord()
    parts: list[bytes | memoryview] = [_filled(NUM_ARRAYS.pack(len(arrays)))]
    for key, value in arrays.items():
        contiguous, name = np.asarray(value, order="C"), key.encode()
        header = _header(contiguous.shape, contiguous.dtype)
        parts += [
            _filled(LENGTHS.pack(len(name), len(header) + contiguous.nbytes) + name),
            header, contiguous.reshape(-1).view(np.uint8).data, bytes(-(len(header) + contiguous.nbytes) % ALIGNMENT),
        ]  # fmt: skip
    data = b"".join(parts)
    return ArrayRecord({PACKED: Array(dtype="uint8", shape=(len(data),), stype=PACKED_TYPE, data=data)})


def pack_by_number(found: Mapping[int, Mapping[str, NDArray[Any]]]) -> ArrayRecord:
    """Pack the arrays of clients or levels under keys of `per_client_key`."""
    return pack_arrays(
        {per_client_key(number, key): value for number, arrays in found.items() for key, value in arrays.items()}
    )


def unpack_arrays(record: ArrayRecord) -> SharedArrays:
    """Return the arrays of a record (untrusted input) as read-only views of its bytes.

    Raises:
        ValueError: If they do not have the format of `pack_arrays`.
    """
    if not record:
        return {}
    number, data = num_arrays(record), memoryview(record[PACKED].data)
    found: SharedArrays = {}
    position = ALIGNMENT
    while position < len(data) and len(found) < number:
        name_size, size = LENGTHS.unpack(_part(data, position, LENGTHS.size))
        if name_size > MOST_NAME:
            raise ValueError(f"the key of an array must have at most {MOST_NAME} bytes, got {name_size}")
        name = _key(_part(data, position + LENGTHS.size, name_size))
        if name in found:
            raise ValueError(f"the array {printable(name)!r} occurs twice")
        start = _next(data, position + LENGTHS.size + name_size)
        try:
            found[name] = _array(_part(data, start, size))
        except ValueError as error:
            raise ValueError(f"the array {printable(name)!r}: {error}") from error
        position = _next(data, start + size)
    if (len(found), position) != (number, len(data)):
        raise ValueError(f"{number} arrays must fill {len(data)} bytes, found {len(found)} in {position} bytes")
    return found


def names_in(record: ArrayRecord | ConfigRecord | MetricRecord) -> list[str]:
    """Return the names in a record: of its arrays, or of its values.

    Raises:
        ValueError: If it has arrays that do not have the format of `pack_arrays`.
    """
    return list(unpack_arrays(record) if isinstance(record, ArrayRecord) else record)


def unreadable_records(content: RecordDict) -> list[str]:
    """Return the names of the records with arrays that do not have the format of `pack_arrays`."""
    found = []
    for name, record in content.items():
        try:
            names_in(record)
        except ValueError:
            found.append(name)
    return found


def num_arrays(record: ArrayRecord) -> int:
    """Return the number of arrays that a record (untrusted input) states; `unpack_arrays` reads no more.

    Raises:
        ValueError: If the record does not have the format of `pack_arrays`.
    """
    if not record:
        return 0
    if list(record) != [PACKED] or record[PACKED].stype != PACKED_TYPE:
        raise ValueError(f"arrays must be packed into one, got a record of {len(record)}")
    packed = record[PACKED]
    data = memoryview(packed.data)
    if (packed.dtype, tuple(packed.shape)) != ("uint8", (len(data),)):  # they travel, too, and no ledger has them
        raise ValueError(f"a packed array must be described as its {len(data)} bytes, uint8")
    (number,) = NUM_ARRAYS.unpack(_part(data, 0, NUM_ARRAYS.size))
    _next(data, NUM_ARRAYS.size)
    return int(number)


def _filled(part: bytes) -> bytes:
    return part + bytes(-len(part) % ALIGNMENT)


def _part(data: memoryview, start: int, size: int) -> memoryview:
    if size > len(data) - start:
        raise ValueError(f"{size} bytes must follow the first {start}, but there are only {len(data)} bytes")
    return data[start : start + size]


def _next(data: memoryview, end: int) -> int:
    """Return where the part after one that ends at `end` begins; between them may only be zeros."""
    if any(_part(data, end, -end % ALIGNMENT)):
        raise ValueError(f"after the first {end} bytes only zeros must fill {ALIGNMENT} bytes")
    return end + -end % ALIGNMENT


def _key(data: memoryview) -> str:
    """Return the key of an array; other characters than those that are printed would take more bytes in a ledger."""
    key = bytes(data).decode(errors="replace")
    if key.encode() != data or not key.isprintable():
        raise ValueError(f"the key of an array must be printable UTF-8, got {bytes(data)!r}")
    return key


def _array(data: memoryview) -> NDArray[Any]:
    """Return an array in numpy's format 1.0 as a view of its bytes."""
    stream = io.BytesIO(data[: 10 + MOST_HEADER])
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("arrays must be serialised by numpy in its format 1.0")
    if int.from_bytes(data[8:10], "little") > MOST_HEADER:  # numpy parses a long header slowly
        raise ValueError(f"the header of an array must have at most {MOST_HEADER} bytes")
    stream.seek(0)
    shape, _, dtype = read_header(stream, len(data))
    if not dtype.itemsize:
        raise ValueError("the elements of an array must have bytes")  # otherwise any shape would fit
    if not all(type(size) is int for size in shape):  # True is 1, but is not written like it
        raise ValueError(f"the shape of an array must be of integers, got {shape}")
    # There are many other ways to write the same, with a comment, for example, or so that the elements are not aligned.
    if data[: stream.tell()] != _header(shape, dtype):
        raise ValueError("the header of an array must be the one that numpy writes for its shape, in C order, and type")
    try:
        return np.frombuffer(data, dtype, math.prod(shape), stream.tell()).reshape(shape)
    except OverflowError as error:
        raise ValueError(f"an array cannot have the shape {shape}") from error


@functools.lru_cache(maxsize=1024)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return numpy's header, in its format 1.0, of an array in C order."""
    stream = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()
