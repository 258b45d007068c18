"""Compute feature vectors part by part, so that a call that was interrupted can be continued.

A part is the features of `PART` images, in a file of its own. It counts as finished while the files of its images are
unchanged; a repeated call computes only the other parts. Batches lie within parts, at places that the list of images
decides, so that the features do not depend on interruptions, in any bit (with an equal number of torch's threads).
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError, RunDirectoryError, StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.files.storage import Arrays, read_arrays, write_arrays
from hyperfl_flwr.data.cache import fingerprint
from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.features.images import prepared

PART = 1024
"""Number of images of a part: at most 154 MB of prepared images in memory, and 5 MB of features on disk."""

INPUTS = "inputs.json"
"""File with what the parts of a folder were computed from."""

_OF_CONTENT = (None, errno.EINVAL, errno.EOVERFLOW)
"""Error numbers of exceptions that a damaged image can lead to, such as by a position before the file's beginning."""

Features = npt.NDArray[np.float32]
Network = Callable[[npt.NDArray[np.uint8]], Features]
"""Computes features [B, D] of prepared images [B, 3, H, W]."""


@dataclass(frozen=True, eq=False)
class Part:
    """A finished part.

    Attributes:
        features: Features [m, D] of its images, without those that could not be read.
        positions: Positions [m] of these images in the list of all.
        broken: Why images could not be read, by their positions.
    """

    features: Features
    positions: IntArray
    broken: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Computation:
    """How features are computed.

    Attributes:
        network: The network.
        batch: Number of images that it takes at a time.
        workers: Number of images that are decoded at a time.
        inputs: What decides the features apart from the images' files, by name; a folder of parts belongs to it.
    """

    network: Network
    batch: int
    workers: int
    inputs: Mapping[str, Any]


def compute(
    files: Sequence[Path | None], folder: Path, computation: Computation, on_images: Callable[[int], None]
) -> None:
    """Compute the parts that are not finished.

    Args:
        files: File of each image; None for a missing one.
        folder: Folder of the parts, whose lock the caller holds.
        computation: How they are computed.
        on_images: Receives the number of images of each part that is finished.

    Raises:
        DataError: If a file cannot be read for a reason that may pass.
        RunDirectoryError: If the folder has parts of other inputs.
    """
    _check_inputs(folder, computation.inputs)
    pool = ThreadPoolExecutor(computation.workers)
    try:
        for number, start in enumerate(range(0, len(files), PART)):
            chosen = files[start : start + PART]
            state = _state(chosen)
            if _read(folder, number, state) is None:
                _compute_part(pool, chosen, start, _path(folder, number), state, computation)
            on_images(len(chosen))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted call does not decode the rest of a part


def read_parts(files: Sequence[Path | None], folder: Path) -> Iterator[Part]:
    """Yield the parts of a folder in order, after `compute` has finished them.

    Raises:
        DataError: If a part is missing, damaged, or of files that have changed since.
    """
    for number, start in enumerate(range(0, len(files), PART)):
        part = _read(folder, number, _state(files[start : start + PART]))
        if part is None:
            raise DataError(f"{_path(folder, number)} must be unchanged, but is not; repeat the command")
        yield part


def _check_inputs(folder: Path, inputs: Mapping[str, Any]) -> None:
    """Check that the parts of a folder were computed from these inputs, or store them in a new folder."""
    file, given = folder / INPUTS, json.loads(json.dumps(inputs))
    if not file.exists():
        write_atomically(file, json.dumps(given, indent=2).encode(), mode=0o600)
        return
    try:
        before = json.loads(file.read_text())
        differing = sorted(key for key in {*before, *given} if before.get(key) != given.get(key))
    except (OSError, ValueError, TypeError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}; delete {folder} to begin again") from None
    if differing:
        raise RunDirectoryError(
            f"{folder} has features that an interrupted call computed from other inputs: {', '.join(differing)}; "
            f"repeat that call, delete the folder to begin again, or choose another --output"
        )


def _compute_part(
    pool: ThreadPoolExecutor, files: Sequence[Path | None], start: int, path: Path, state: str, computation: Computation
) -> None:
    present = [(start + place, file) for place, file in enumerate(files) if file is not None]
    decoded = pool.map(_decode, (file for _, file in present))
    features, positions, broken = [], [], {}
    images: list[npt.NDArray[np.uint8]] = []
    for number, (position, result) in enumerate(zip((place for place, _ in present), decoded, strict=True), start=1):
        if isinstance(result, str):
            broken[str(position)] = result
        else:
            images.append(result)
            positions.append(position)
        if images and (len(images) == computation.batch or number == len(present)):
            features.append(computation.network(np.stack(images)))
            images = []
    arrays: Arrays = {
        "features": np.concatenate(features) if features else np.zeros((0, 0), np.float32),
        "positions": np.array(positions, dtype=np.int64),
    }
    write_arrays(path, arrays, {"state": state, "broken": broken}, mode=0o600)


def _decode(file: Path) -> npt.NDArray[np.uint8] | str:
    """Return a prepared image, or why the file is broken.

    Raises:
        DataError: If it cannot be read for a reason that may pass, such as a permission; the part is not finished then.
    """
    try:
        return prepared(file)
    except DataError as error:
        if reason := _passing(error.__cause__):
            raise DataError(
                f"{file} cannot be read: {reason}; correct that, or remove the file, and repeat the command to go on"
            ) from error
        return str(error)


def _passing(error: BaseException | None) -> str:
    """Return why a file cannot be read at present; empty if its content is the reason."""
    if isinstance(error, MemoryError):
        return "it does not fit into the free memory"
    if isinstance(error, OSError) and error.errno not in _OF_CONTENT:
        return error.strerror or str(error)
    return ""


def _read(folder: Path, number: int, state: str) -> Part | None:
    """Return a part; None if it is missing or damaged, or if files of its images have changed."""
    try:
        arrays, meta = read_arrays(_path(folder, number))
        if meta["state"] != state:
            return None
        broken = {int(position): str(reason) for position, reason in meta["broken"].items()}
        return Part(arrays["features"], arrays["positions"], broken)
    except (StateError, KeyError):
        return None


def _state(files: Sequence[Path | None]) -> str:
    """Return a fingerprint of the files of a part's images; a missing image has none."""
    present = [file for file in files if file is not None]
    return f"{fingerprint(present)} {''.join('-' if file is None else '+' for file in files)}"


def _path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.npz"
