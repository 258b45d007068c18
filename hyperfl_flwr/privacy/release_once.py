"""Cache one noisy release: a repeated request gets the same vector and spends no more of the privacy budget.

A server that gets k vectors with new noise from the same data can average the noise away: together they are
(k epsilon, k delta)-private. A repeated message must therefore get the same reply as before. The vector is stored in a
file, together with its inputs; for other inputs the owner must allow another release, by choosing another file.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.folder_lock import wait_for_folder
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays

_VECTOR = "vector"


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return a digest (64 hexadecimal digits) of the shapes, types and values of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def release_once(
    path: Path, made_of: Mapping[str, str | float | None], make: Callable[[], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the vector in a file; if there is none, compute it and store it before returning it.

    Args:
        path: The file, in an existing folder; it is created with access for its owner only.
        made_of: Inputs that identify the release.
        make: Function that computes the vector.

    Raises:
        StateError: If the file has a vector with other inputs, or is damaged.
    """
    with wait_for_folder(path.parent):  # another process may handle the repeated message at the same time
        if not path.exists():
            write_arrays(path, {_VECTOR: make()}, dict(made_of), mode=0o600)
        arrays, stored = read_arrays(path)
    if changed := [key for key in made_of if stored.get(key) != made_of[key]]:
        raise StateError(
            f"{path} has already been released with other {', '.join(changed)}; each release spends another epsilon "
            f"and delta (k releases: k epsilon, k delta): choose another output folder to allow one more release"
        )
    vector: NDArray[np.float64] = arrays[_VECTOR]
    return vector
