"""Arrays on disk: written atomically, read back without pickle, and checked.

The format is numpy's npz without compression: a zip archive, whose checksums reveal a damaged file.
"""

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.errors import StateError

Arrays = dict[str, NDArray[Any]]

_META = "meta.json"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content so that a reader, or a crash at any moment, sees the old or the new one in full."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, mode)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """Write arrays and a JSON-able dict to one file, atomically; the file is on disk when this returns."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                archive.writestr(_META, json.dumps(meta))
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, mode)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read what `write_arrays` wrote.

    Raises:
        StateError: If the file is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"its part {damaged} fails its checksum")
            meta: dict[str, Any] = json.loads(archive.read(_META))
            arrays: Arrays = {}
            for name in archive.namelist():
                if name != _META:
                    with archive.open(name) as member:
                        arrays[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    except FileNotFoundError:
        raise StateError(f"{path} is missing; it was deleted, or belongs to another machine") from None
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, OSError, EOFError) as error:
        raise StateError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore it from a copy or start a new run"
        ) from error
    return arrays, meta


def _publish(temporary: str, path: Path, mode: int) -> None:
    Path(temporary).chmod(mode)
    Path(temporary).replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
