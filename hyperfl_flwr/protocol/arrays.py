"""Pack, unpack and check the named parameter arrays of a Flower message."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.messages import Reduction, group_of, printable

SharedArrays = dict[str, NDArray[Any]]
"""Shared parameters by `group/name`."""


class MatrixTotal(Protocol):
    """A sum of matrices that is up to date after `finish` only: until then terms may wait, or be on another device."""

    def add(self, matrix: Any, scale: float, grid: float) -> None:  # noqa: ANN401 - a matrix of the same kind
        """Add grid * rint(scale * matrix) to the sum, in float64; exact if grid is a power of two.

        The matrix must not change before `finish`.
        """

    def finish(self) -> None:
        """Write to the sum what has been added since the last call."""


class BlockArray(Protocol):
    """Interface: a matrix that is formed by blocks of columns, where all of it need not be in memory at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (p, P)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, a floating point one."""

    @property
    def bound(self) -> float:
        """A number that no magnitude of an element exceeds; NaN or infinite if unknown."""

    def columns(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield blocks of columns [p, w], each with its slice; a block is valid until the next one."""

    def formed(self) -> NDArray[Any]:
        """Return the matrix [p, P], with the elements that `columns` yields."""

    def new_total(self, sums: NDArray[np.float64]) -> MatrixTotal:
        """Return what adds matrices like this one to sums [p, P]."""


Uploads = Mapping[str, NDArray[Any] | BlockArray]
"""A client's shared parameters after training, by `group/name`."""

DIVERGED = "is not finite after training"
"""Text of the reason of a failed training that has diverged."""

BLOCK = 1 << 16
"""Number of array elements to process at a time, so that intermediate results stay in the processor's cache."""


def blocks(array: NDArray[Any]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the elements of an array in blocks of `BLOCK`, each with its slice of the flat array."""
    flat = array.reshape(-1)
    for first in range(0, flat.size, BLOCK):
        part = slice(first, first + BLOCK)
        yield part, flat[part]


def per_client_key(number: int, key: str) -> str:
    """Return the key `client/group/name` of one client's array, or `level/group/name` of a sum of one level."""
    return f"{number}/{key}"


def by_number(arrays: Mapping[str, NDArray[Any]]) -> dict[int, dict[str, NDArray[Any]]]:
    """Return arrays with keys of `per_client_key` grouped by their number (client or level), with keys `group/name`.

    Raises:
        ValueError: If a key does not begin with a number, as `str` writes it: otherwise two keys could mean one array.
    """
    found: dict[int, dict[str, NDArray[Any]]] = {}
    for key, value in arrays.items():
        number, _, rest = key.partition("/")
        if not number.isdecimal() or str(int(number)) != number:
            raise ValueError(f"arrays of one client or level must have keys NUMBER/GROUP/NAME, got {printable(key)!r}")
        found.setdefault(int(number), {})[rest] = value
    return found


def select(
    arrays: SharedArrays, reductions: Mapping[str, Reduction], is_wanted: Callable[[Reduction], bool]
) -> SharedArrays:
    """Return the arrays, keyed `group/name`, of the groups with a wanted reduction.

    Raises:
        KeyError: If a group has no reduction.
    """
    return {key: value for key, value in arrays.items() if is_wanted(reductions[group_of(key)])}


def num_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the total size of arrays in memory, in bytes."""
    return sum(value.nbytes for value in arrays.values())


def num_elements(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the number of elements of all arrays."""
    return sum(value.size for value in arrays.values())


def formed(array: NDArray[Any] | BlockArray) -> NDArray[Any]:
    """Return an array as one of numpy."""
    return array if isinstance(array, np.ndarray) else array.formed()


def all_formed(arrays: Uploads) -> SharedArrays:
    """Return a client's parameters as arrays of numpy."""
    return {key: formed(value) for key, value in arrays.items()}


def layout_problem(expected: Mapping[str, NDArray[Any]], actual: Uploads) -> str | None:
    """Return how the names, shapes or types of arrays differ from the expected ones; None if they match."""
    if missing := sorted(set(expected) - set(actual)):
        return f"arrays are missing: {', '.join(missing)}"
    if unknown := sorted(set(actual) - set(expected)):
        return f"unexpected arrays: {', '.join(unknown)}"
    for key, reference in expected.items():
        if actual[key].shape != reference.shape:
            return f"{key} has shape {actual[key].shape}, expected {reference.shape}"
        if actual[key].dtype != reference.dtype:
            return f"{key} has type {actual[key].dtype}, expected {reference.dtype}"
    return None


def not_finite(arrays: Uploads) -> str | None:
    """Return the name of the first array that holds a NaN or an infinity; None if all are finite."""
    return next((key for key, value in arrays.items() if value.dtype.kind == "f" and not _is_finite(value)), None)


def diverged(key: str) -> FloatingPointError:
    """Return the error for an array, by its key, that is not finite after training."""
    return FloatingPointError(
        f"{key} {DIVERGED}; lower learning-rate if many clients fail in this way, otherwise check the client's data"
    )


def _is_finite(array: NDArray[Any] | BlockArray) -> bool:
    """Return True if all elements are finite.

    The sum of squares is finite only if all elements are; it needs one pass and no temporary array. If it overflows,
    the elements themselves are summed in float64, which finite float32 cannot overflow.
    """
    if not isinstance(array, np.ndarray):
        return array.bound <= float(np.finfo(array.dtype).max) or all(_is_finite(block) for _, block in array.columns())
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(np.add.reduce(flat, dtype=np.float64)))
