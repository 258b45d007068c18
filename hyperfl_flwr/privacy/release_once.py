"""A vector that is released once: asked for again, it is given as it was.

Whoever gets k vectors with fresh noise from the same data can average the noise away: together they are
(k epsilon, k delta)-private. A message that is sent again must therefore be answered with what was sent before. The
vector is kept in a file, with what it was made of; for anything else the owner has to say so, by another file.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import read_arrays, write_arrays

_VECTOR = "vector"


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return 64 hexadecimal digits that differ where shapes, types or values of arrays do."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def release_once(
    path: Path, made_of: Mapping[str, str | float | None], make: Callable[[], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the vector in a file, or make it and store it before it is returned.

    Args:
        path: The file, in a folder that exists; made readable by its owner alone.
        made_of: What decides whether it is the same release.
        make: Makes the vector.

    Raises:
        StateError: If the file holds a vector that was made of something else, or is damaged.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # a message that is sent again may be answered by another process
        if not path.exists():
            write_arrays(path, {_VECTOR: make()}, dict(made_of), mode=0o600)
        arrays, stored = read_arrays(path)
    finally:
        os.close(folder)
    if changed := [key for key in made_of if stored.get(key) != made_of[key]]:
        raise StateError(
            f"{path} has been released already, with other {', '.join(changed)}; each release spends epsilon and "
            f"delta anew (k of them are together k epsilon, k delta): choose another output folder to release one more"
        )
    vector: NDArray[np.float64] = arrays[_VECTOR]
    return vector
