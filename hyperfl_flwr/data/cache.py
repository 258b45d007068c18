"""Cache decoded arrays on disk, shared by all processes of a machine.

Decoding CIFAR-100 takes a second and 180 MB in every process. The first process writes plain `.npy` files; all others
map them, so that the operating system keeps one copy. The cache is optional: it is rebuilt if it is damaged, and if it
cannot be written, the arrays stay in memory. What a process that was killed has left of a cache is deleted by the next
one that uses any data set of the cache.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import FolderInUseError, RunDirectoryError
from hyperfl_flwr.core.files.checked_files import read_header
from hyperfl_flwr.core.files.folder_lock import lock_folder

_FORMAT = 1
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
CLIENTS = ("train_clients", "test_clients")
Arrays = Mapping[str, npt.NDArray[Any]]


def cache_directory() -> Path:
    """Return the project's cache directory for this user; it need not exist.

    Its parent is `$XDG_CACHE_HOME` if that is an absolute path, else ~/Library/Caches on macOS and ~/.cache elsewhere.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        base = Path(configured)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "hyperfl"


def fingerprint(paths: Sequence[Path]) -> str:
    """Return a fingerprint that changes whenever one of the files or its path changes.

    Args:
        paths: Files; a missing file is part of the fingerprint, too.

    Returns:
        16 hexadecimal digits from the paths, sizes and modification times.
    """
    entries: list[tuple[str, int, int]] = []
    for path in paths:
        try:
            status = path.stat()
            entries.append((str(path), status.st_size, status.st_mtime_ns))
        except OSError:
            entries.append((str(path), -1, -1))
    return hashlib.sha256(repr((_FORMAT, entries)).encode()).hexdigest()[:16]


def load_or_build(
    key: str,
    build: Callable[[], Arrays],
    names: Sequence[str] = ARRAYS,
    *,
    base: Path | None = None,
    family: str = "",
) -> Arrays:
    """Return the decoded arrays of one data set, from the cache if possible.

    Args:
        key: Identifies the data set and the state of its source files; used as a folder name.
        build: Function that decodes the source files into the arrays; its errors are passed on.
        names: Names of the arrays: `ARRAYS` and, for a data set with client ids, `CLIENTS`.
        base: Folder of the cache; None for the user's cache directory.
        family: Common prefix of the keys of all states of the same files: writing one state deletes the others.

    Returns:
        The arrays by name: images uint8 [n, C, H, W], labels and clients int64 [n]; read-only, mapped from disk where
        possible.
    """
    folder = (base or cache_directory()) / "decoded" / key
    _remove_leftovers(folder.parent)
    cached = _read(folder, names)
    if cached is not None:
        return cached
    arrays = build()
    try:
        _write(folder, arrays, names)
    except (OSError, FolderInUseError):
        return arrays  # a full or read-only disk: this process works from memory
    if family:
        for other in folder.parent.glob(f"{family}*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)  # processes that have mapped its files keep them
    return _read(folder, names) or arrays


def _read(folder: Path, names: Sequence[str]) -> Arrays | None:
    """Map the arrays of a cache folder; None if one is missing or damaged."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        for name in names:
            arrays[name] = _map(folder / f"{name}.npy")
    except (OSError, ValueError):
        return None
    for name, array in arrays.items():
        images = arrays[f"{name.partition('_')[0]}_images"]
        expected = (np.dtype(np.uint8), 4) if array is images else (np.dtype(np.int64), 1)
        if (array.dtype, array.ndim) != expected or len(array) != len(images):
            return None
    return arrays


def _map(path: Path) -> npt.NDArray[Any]:
    """Map a file as a plain array; indexing an np.memmap is slower and returns np.memmap objects."""
    with path.open("rb") as file:
        shape, is_fortran, dtype = read_header(file, path.stat().st_size)
        order: Literal["F", "C"] = "F" if is_fortran else "C"
        return np.asarray(np.memmap(file, dtype, "r", file.tell(), shape, order))


def _write(folder: Path, arrays: Arrays, names: Sequence[str]) -> None:
    """Write a cache folder atomically: other processes see all of it or nothing.

    Raises:
        FolderInUseError: If another process took the temporary folder for a leftover, before it was locked.
        OSError: If it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _locked(temporary):
            for name in names:
                np.save(temporary / f"{name}.npy", arrays[name], allow_pickle=False)
            if folder.exists() and _read(folder, names) is None:
                shutil.rmtree(folder)
            if not folder.exists():
                temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _locked(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Lock a folder where the file system has locks; elsewhere leftovers stay."""
    try:
        return lock_folder(folder)
    except FolderInUseError:
        raise
    except RunDirectoryError:
        return contextlib.nullcontext()


def _remove_leftovers(parent: Path) -> None:
    """Delete the temporary folders of processes that were killed; one that is still written is locked."""
    for folder in parent.glob(".*-*/"):
        with contextlib.suppress(OSError, RunDirectoryError), lock_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
