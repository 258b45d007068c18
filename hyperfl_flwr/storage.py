"""Arrays on disk: written atomically, read back without pickle, and checked.

The format is numpy's npz without compression: a zip archive, whose checksums reveal a damaged file.
"""

import contextlib
import errno
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.errors import StateError

Arrays = dict[str, NDArray[Any]]

_META = "meta.json"

_DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, OSError, EOFError, NotImplementedError, RuntimeError)
"""What reading a damaged zip archive raises: a flipped bit may claim encryption or a format yet to be invented."""


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
    with _checked(path), zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read(_META))
        arrays: Arrays = {}
        for name in document["arrays"]:
            with archive.open(f"{name}.npy") as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
        meta: dict[str, Any] = document["meta"]
    return arrays, meta


def stored_bytes(path: Path) -> dict[str, int]:
    """Return the size of each array in a file that `write_arrays` wrote, in memory; only their headers are read.

    Raises:
        StateError: If the file is missing or damaged.
    """
    with _checked(path), zipfile.ZipFile(path) as archive:
        return {name: _size(archive, f"{name}.npy") for name in json.loads(archive.read(_META))["arrays"]}


def leftovers(folder: Path, pattern: str) -> list[Path]:
    """Return unfinished files, of processes that were killed or still write; `pattern` is of the finished names."""
    return sorted(folder.glob(f".{pattern}.*"))


def unwritable(folder: Path, error: OSError, num_bytes: int) -> str:
    """Return in words why a file of so many bytes could not be written to a folder, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk of {folder} is full ({error.strerror}); make room for {num_bytes} bytes"
    return f"{folder} cannot be written ({error.strerror or error}); correct its owner or its disk"


def _size(archive: zipfile.ZipFile, name: str) -> int:
    """Return a member's size without numpy's header."""
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        read(member)
        return archive.getinfo(name).file_size - member.tell()


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Say in words what is wrong with a file that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise StateError(f"{path} is missing; it was deleted, or belongs to another machine") from None
    except _DAMAGED as error:
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
