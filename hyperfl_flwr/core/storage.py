"""Arrays on disk: written atomically, read back without pickle, and checked.

The format is numpy's npz without compression: a zip archive, whose checksums reveal a damaged file.
"""

import contextlib
import errno
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.checked_files import array_bytes, check_members, open_archive, read_array, read_member
from hyperfl_flwr.core.errors import StateError

Arrays = dict[str, NDArray[Any]]

_META = "meta.json"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content so that a reader, or a crash at any moment, sees the old or the new one in full."""
    with _replacement(path, mode) as file:
        file.write(data)


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """Write arrays and a JSON-able dict to one file, atomically; the file is on disk when this returns."""
    with _replacement(path, mode) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_META, json.dumps({"arrays": list(arrays), "meta": meta}))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read what `write_arrays` wrote.

    Raises:
        StateError: If the file is missing or damaged.
    """
    with _checked(path), open_archive(path) as archive:
        names, meta = _document(archive)
        check_members(archive, names.values())
        return {key: read_array(archive, name) for key, name in names.items()}, meta


def stored_bytes(path: Path) -> dict[str, int]:
    """Return the size of each array in a file that `write_arrays` wrote, in memory; only their headers are read.

    Raises:
        StateError: If the file is missing or damaged.
    """
    with _checked(path), open_archive(path) as archive:
        names, _ = _document(archive)
        return {key: array_bytes(archive, name) for key, name in names.items()}


def leftovers(folder: Path, pattern: str) -> list[Path]:
    """Return unfinished files, of processes that were killed or still write; `pattern` is of the finished names."""
    return sorted(folder.glob(f".{pattern}.*"))


def unwritable(folder: Path, error: OSError, num_bytes: int) -> str:
    """Return in words why a file of so many bytes could not be written to a folder, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk of {folder} is full ({error.strerror}); make room for {num_bytes} bytes"
    return f"{folder} cannot be written ({error.strerror or error}); correct its owner or its disk"


def _document(archive: zipfile.ZipFile) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the members that hold the arrays, by the arrays' names, and the meta data."""
    document = json.loads(read_member(archive, _META))
    meta, names = document["meta"], document["arrays"]
    if not isinstance(meta, dict) or not isinstance(names, list):
        raise TypeError(f"{_META} must hold a list of arrays and an object of meta data")
    return {key: f"{key}.npy" for key in names}, meta


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Say in words what is wrong with a file that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise StateError(f"{path} is missing; it was deleted, or belongs to another machine") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore it from a copy or start a new run"
        ) from error


@contextlib.contextmanager
def _replacement(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of `path` at the end, or vanishes if there is an exception."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # and not that of a file which nobody knows
        raise
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
