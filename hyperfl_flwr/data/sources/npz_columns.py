"""Read the columns of a numpy `.npz` file that say something of each sample: label, client, group and weight."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.target_scale import LARGEST_TARGET
from hyperfl_flwr.core.tasks import MULTI_LABEL, REGRESSION, Task
from hyperfl_flwr.data.dataset import IntArray, Targets
from hyperfl_flwr.data.grouped_split import numbered, refuse_shared

RawArrays = Mapping[str, npt.NDArray[Any]]
"""Arrays of a file by key."""


def wrong(path: Path, problem: str, remedy: str) -> DataError:
    """Return the error for a file: what is wrong with it, and what to do."""
    return DataError(f"{path}: {problem}; {remedy}")


def group_numbers(arrays: RawArrays, train: int, test: int | None, path: Path) -> tuple[IntArray | None, ...]:
    """Number the groups of the training and of the test samples, equal names as the same number.

    Args:
        arrays: Arrays of the file.
        train: Number of training samples.
        test: Number of test samples; None without test data.
        path: The file.

    Returns:
        The groups of the training and of the test samples; None where the file has none.

    Raises:
        DataError: If a column is wrong, or a group is in both.
    """
    if "test_groups" in arrays and ("groups" not in arrays or test is None):
        raise wrong(path, "test_groups need groups and test data", "add them, or drop test_groups")
    if "groups" not in arrays:
        return None, None
    if test is not None and "test_groups" not in arrays:
        raise wrong(
            path,
            "groups without test_groups do not say whether a group is in the training and in the test data",
            "add test_groups, or drop the test data to have them divided by groups, or set data.group-by=none",
        )
    columns = [_column(arrays["groups"], "groups", train, path)]
    if test is None:
        return numbered(*columns)[0], None
    columns.append(_column(arrays["test_groups"], "test_groups", test, path))
    if len({column.dtype.kind in "US" for column in columns}) == 2:
        raise wrong(path, "groups and test_groups must both be integers, or both strings", "convert one of them")
    groups, of_test = numbered(*columns)
    refuse_shared(groups, of_test, str(path))
    return groups, of_test


def _column(array: npt.NDArray[Any], key: str, count: int, path: Path) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iuUS" or array.shape != (count,):
        raise wrong(
            path,
            f"{key} must be {count} integers or strings, one per sample, got {array.dtype} of shape {array.shape}",
            "fix it",
        )
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def sample_weights(arrays: RawArrays, count: int, path: Path) -> npt.NDArray[np.float64] | None:
    """Return the weights of the training samples; None where the file has none.

    Raises:
        DataError: If they are not finite numbers of at least 0, one per sample, or all are 0.
    """
    if "weights" not in arrays:
        return None
    found = arrays["weights"]
    if found.dtype.kind not in "iuf" or found.shape != (count,):
        raise wrong(
            path,
            f"weights must be {count} numbers, one per training sample, got {found.dtype} of shape {found.shape}",
            "fix it, or drop the key",
        )
    weights = found.astype(np.float64)
    if broken := int((~np.isfinite(weights) | (weights < 0)).sum()):
        raise wrong(path, f"weights must be finite and at least 0, {broken} of {count} are not", "fix them")
    if not weights.any():
        raise wrong(path, "weights must not all be 0", "give a sample a weight above 0, or drop the key")
    return weights


def class_numbers(array: npt.NDArray[Any], key: str, count: int, path: Path) -> IntArray:
    """Return labels 0..K-1, one per sample.

    Raises:
        DataError: If they are anything else.
    """
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise wrong(
            path,
            f"{key} must be {count} integers, one per sample, got {array.dtype} of shape {array.shape}",
            _how_to_number(array, key),
        )
    if array.min() < 0:
        raise wrong(path, f"{key} must be 0..K-1, got {array.min()}", "renumber the classes from 0")
    return array.astype(np.int64)


def _how_to_number(array: npt.NDArray[Any], key: str) -> str:
    """Return what to do about labels that are no numbers of classes."""
    if array.ndim == 2 and array.shape[1] == 1:
        return f"save {key}[:, 0]"
    if array.ndim == 2:
        return f"if each row marks one class, save {key}.argmax(1); if it marks several, set task={MULTI_LABEL.name}"
    if array.dtype.kind in "US":
        return f"save np.unique({key}, return_inverse=True)[1]"
    return f"fix it, or set task={REGRESSION.name}" if array.dtype.kind == "f" else "fix it"


def target_values(array: npt.NDArray[Any], key: str, count: int, task: Task, path: Path) -> Targets:
    """Return what is predicted of each sample by another task than classification [n, K].

    Raises:
        DataError: If they are not labels of 0 and 1 [n, K], or numbers up to `LARGEST_TARGET` [n] or [n, K].
    """
    shape = f"got {array.dtype} of shape {array.shape}"
    if task is MULTI_LABEL:
        if array.dtype.kind not in "biu" or array.ndim != 2 or len(array) != count or not array.shape[1]:
            raise wrong(
                path, f"{key} must be [{count}, K] of 0 and 1, a column per label, with task=multi-label; {shape}",
                "fix it",
            )  # fmt: skip
        if other := np.setdiff1d(array, (0, 1)).tolist():
            raise wrong(path, f"{key} must be 0 or 1 with task=multi-label, got {other[0]}", "fix it")
        return array.astype(bool)
    columns = array[:, None] if array.ndim == 1 else array
    if array.dtype.kind not in "iuf" or columns.ndim != 2 or len(columns) != count or not columns.shape[1]:
        raise wrong(path, f"{key} must be {count} numbers, or [{count}, K], with task=regression; {shape}", "fix it")
    found = columns.astype(np.float64)
    if broken := int((~(np.abs(found) <= LARGEST_TARGET)).any(axis=1).sum()):
        raise wrong(
            path, f"{key} must be numbers up to {LARGEST_TARGET:g}, {broken} of {count} samples have others", "fix them"
        )
    return found


def client_numbers(arrays: RawArrays, count: int, path: Path) -> tuple[IntArray | None, npt.NDArray[Any] | None]:
    """Number the client ids 0..N-1 in sorted order."""
    if "clients" not in arrays:
        return None, None
    ids, numbers = np.unique(_column(arrays["clients"], "clients", count, path), return_inverse=True)
    return numbers.astype(np.int64), ids


def match_clients(array: npt.NDArray[Any], ids: npt.NDArray[Any], count: int, path: Path) -> IntArray:
    """Number test clients like the training clients, and check that each of them has test data."""
    column = _column(array, "test_clients", count, path)
    same_kind = (column.dtype.kind in "US") == (ids.dtype.kind in "US")
    unknown = np.setdiff1d(column, ids) if same_kind else np.unique(column)
    if unknown.size:
        raise wrong(path, f"test_clients must occur in clients, got {unknown[0].item()!r}", "remove or rename it")
    without = np.setdiff1d(ids, column)
    if without.size:
        raise wrong(
            path,
            f"every client must have test data, but client {without[0].item()!r} has none",
            "add some, or drop test_clients",
        )
    return np.searchsorted(ids, column).astype(np.int64)


def refuse_near_keys(names: Iterable[str], known: Collection[str], path: Path) -> None:
    """Refuse a key that would not be read, although it nearly says what a known one says, such as `group`.

    Args:
        names: The keys of the file that are not known.
        known: The known keys that the file does not have.
        path: The file, for errors.

    Raises:
        DataError: If there is one.
    """
    for name in names:
        if (meant := _meant(name)) in known:
            raise wrong(path, f"the key {name} would not be read, but is nearly {meant}", f"rename it to {meant}")


def _meant(name: str) -> str:
    """Return a key in the form of the known ones: in small letters and in the plural, with `test_` first."""
    words = [word for word in re.split(r"[\W_]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]
    is_test = "test" in words
    words = [word for word in words if word not in ("test", "train", "sample", "samples")]
    return "_".join(["test"] * is_test + [word.removesuffix("s") + "s" for word in words])
