"""Parameters as they travel: named arrays in a Flower record, packed, unpacked and checked."""

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from hyperfl_flwr.core.checked_files import read_header

SharedArrays = dict[str, NDArray[Any]]
"""Shared parameters by `group/name`."""

MOST_HEADER = 512
"""Bytes of the header of a packed array; those that are packed here have some hundred."""

NUMPY_TYPE = Array(np.zeros(0)).stype
"""What Flower calls an array that is serialised in numpy's format."""

BLOCK = 1 << 16
"""Elements of an array that are worked on together: what is made of them stays in a processor's cache."""


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack arrays into a record, under the same keys; each is copied once."""
    return ArrayRecord({key: _pack(value) for key, value in arrays.items()})


def unpack_arrays(record: ArrayRecord) -> SharedArrays:
    """Return a record's arrays as read-only views of its bytes.

    Raises:
        ValueError: If they are not what `pack_arrays` makes.
    """
    return {key: _unpack(value) for key, value in record.items()}


def _pack(value: NDArray[Any]) -> Array:
    """Return what Flower's `Array(value)` is, with one copy where that makes two."""
    contiguous = np.asarray(value, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(contiguous))
    data = b"".join((header.getvalue(), contiguous.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(value.dtype), shape=value.shape, stype=NUMPY_TYPE, data=data)


def _unpack(array: Array) -> NDArray[Any]:
    """Return what `array.numpy()` is, without a copy."""
    stream = io.BytesIO(array.data)
    if array.stype != NUMPY_TYPE or np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"arrays must be serialised by numpy in its format 1.0, got {array.stype!r}")
    if int.from_bytes(array.data[8:10], "little") > MOST_HEADER:  # a long one takes long to parse
        raise ValueError(f"the header of an array must have at most {MOST_HEADER} bytes")
    stream.seek(0)
    shape, is_fortran, dtype = read_header(stream, len(array.data))
    if is_fortran:
        raise ValueError("arrays must be in C order")
    return np.frombuffer(array.data, dtype, math.prod(shape), stream.tell()).reshape(shape)


def blocks(array: NDArray[Any]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield an array's elements, `BLOCK` at a time, each with its place in the flat array."""
    flat = array.reshape(-1)
    for first in range(0, flat.size, BLOCK):
        part = slice(first, first + BLOCK)
        yield part, flat[part]


def num_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the size of arrays in memory, in bytes."""
    return sum(value.nbytes for value in arrays.values())


def layout_problem(expected: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]) -> str | None:
    """Say in what way names, shapes or types of arrays differ from what is expected; None if they do not."""
    if missing := sorted(set(expected) - set(got)):
        return f"arrays are missing: {', '.join(missing)}"
    if unknown := sorted(set(got) - set(expected)):
        return f"unexpected arrays: {', '.join(unknown)}"
    for key, want in expected.items():
        if got[key].shape != want.shape:
            return f"{key} has shape {got[key].shape}, expected {want.shape}"
        if got[key].dtype != want.dtype:
            return f"{key} has type {got[key].dtype}, expected {want.dtype}"
    return None


def not_finite(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """Return the name of an array that holds a NaN or an infinity; None if there is none."""
    return next((key for key, value in arrays.items() if value.dtype.kind == "f" and not _is_finite(value)), None)


def _is_finite(array: NDArray[Any]) -> bool:
    """Say whether all elements are finite, in one pass over their squares, without a temporary.

    Where the squares overflow, the elements themselves are added up: finite float32 cannot overflow a float64.
    """
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(np.add.reduce(flat, dtype=np.float64)))
