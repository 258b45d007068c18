"""Store arrays on disk: atomic writes (`hyperfl_flwr.core.files.atomic_files`), and checked reads without pickle.

The format is numpy's npz without compression. It is a zip archive, in which checksums reveal damage.
"""

import contextlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import replacement
from hyperfl_flwr.core.files.checked_files import array_bytes, check_members, open_archive, read_array, read_member

Arrays = dict[str, NDArray[Any]]

_META = "meta.json"


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """Write arrays and a dict of JSON values to one file, atomically; the file is on disk when this returns."""
    with replacement(path, mode) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_META, json.dumps({"arrays": list(arrays), "meta": meta}))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


@dataclass(frozen=True, eq=False)
class Pieces:
    """An array that is given piece by piece, so that it need not fit into memory.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        pieces: Its rows, in order: arrays of any number of rows.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    pieces: Iterable[NDArray[Any]]


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any] | Pieces], *, mode: int = 0o644) -> None:
    """Write a file as `numpy.savez` does, atomically; the file is on disk when this returns.

    Equal arrays make equal files: the members have no time.

    Raises:
        ValueError: If pieces do not have the declared number of rows.
    """
    with replacement(path, mode) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                if not isinstance(array, Pieces):
                    np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
                    continue
                descr = np.lib.format.dtype_to_descr(np.dtype(array.dtype))
                header = {"descr": descr, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(member, header)
                rows = 0
                for piece in array.pieces:
                    member.write(np.ascontiguousarray(piece, dtype=array.dtype).tobytes())
                    rows += len(piece)
                if rows != array.shape[0]:
                    raise ValueError(f"{name} must have {array.shape[0]} rows, got {rows}")


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read the arrays and the meta data of a file that `write_arrays` wrote.

    Raises:
        StateError: If the file is missing or damaged.
    """
    with _checked(path), open_archive(path) as archive:
        names, meta = _document(archive)
        check_members(archive, names.values())
        return {key: read_array(archive, name) for key, name in names.items()}, meta


def stored_bytes(path: Path) -> dict[str, int]:
    """Return the size in memory, in bytes, of each array in a file of `write_arrays`; reads only the headers.

    Raises:
        StateError: If the file is missing or damaged.
    """
    with _checked(path), open_archive(path) as archive:
        names, _ = _document(archive)
        return {key: array_bytes(archive, name) for key, name in names.items()}


def _document(archive: zipfile.ZipFile) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the archive member of each array, by the array's name, and the meta data."""
    document = json.loads(read_member(archive, _META))
    meta, names = document["meta"], document["arrays"]
    if not isinstance(meta, dict) or not isinstance(names, list):
        raise TypeError(f"{_META} must hold a list of arrays and an object of meta data")
    return {key: f"{key}.npy" for key in names}, meta


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Convert the errors of reading a file to a `StateError` that says what is wrong and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise StateError(f"{path} is missing; it was deleted, or belongs to another machine") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore it from a copy or start a new run"
        ) from error
