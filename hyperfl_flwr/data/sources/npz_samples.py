"""Check the samples of a numpy `.npz` file, images or feature vectors, and convert them to one layout."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.files.checked_files import MalformedFileError, refuse_excess
from hyperfl_flwr.data.dataset import ImageArray
from hyperfl_flwr.data.sources.npz_columns import wrong

KINDS = ("images", "features")
"""Keys of the samples, of which a file has one."""

CHANNELS = (1, 3)
CHUNK = 4096


def reader_of(kind: str) -> Callable[[npt.NDArray[Any], str, Path], ImageArray]:
    """Return the function that checks and converts samples of a kind: (array, its key, the file) -> samples."""
    return _images if kind == "images" else _features


def refuse_copies(samples: Mapping[str, npt.NDArray[Any]], path: Path, *, divided: bool = False) -> None:
    """Check that the copies of samples, which the functions of `reader_of` make, fit into this machine's memory.

    Args:
        samples: The samples by key.
        path: The file.
        divided: Whether they are divided into training and test data afterwards, by a further copy.

    Raises:
        DataError: If the copies do not fit. Samples of which none is needed always do.
    """
    try:
        refuse_excess(sum(_copied_bytes(array, divided) for array in samples.values()))
    except MalformedFileError as error:
        raise wrong(
            path,
            f"a copy of {' and '.join(samples)} is needed, but {error}",
            "store float32 features or uint8 images [n, C, H, W], and test data, with numpy.savez, which need no copy",
        ) from error


def _copied_bytes(array: npt.NDArray[Any], divided: bool) -> int:
    if array.ndim == 4 and array.shape[1] not in CHANNELS:
        array = array.transpose(0, 3, 1, 2)
    dtype = np.dtype(np.uint8 if array.dtype == np.uint8 else np.float32)
    copies = (array.dtype != dtype or not array.flags.c_contiguous) + divided
    return copies * array.size * dtype.itemsize


def _images(array: npt.NDArray[Any], key: str, path: Path) -> ImageArray:
    """Check images and convert them to [n, C, H, W]."""
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4:
        first, last = array.shape[1] in CHANNELS, array.shape[3] in CHANNELS
        if first == last:
            problem = "must have only one axis of 1 or 3 channels in" if first else "must have 1 or 3 channels in"
            raise wrong(path, f"{problem} {key} of shape {array.shape}", "store it as [n, C, H, W] or [n, H, W, C]")
        array = array if first else array.transpose(0, 3, 1, 2)
    else:
        raise wrong(
            path,
            f"{key} must have 3 or 4 dimensions, got the shape {array.shape}",
            "store it as [n, H, W], or vectors as features",
        )
    if array.size == 0:
        raise wrong(path, f"{key} must not be empty, got the shape {array.shape}", "add images")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind != "f":
        raise wrong(path, f"{key} must be uint8 or floats in [0, 1], got {array.dtype}", "convert it")
    for start in range(0, len(array), CHUNK):
        chunk = array[start : start + CHUNK]
        outside = chunk[~np.isnan(chunk) & ((chunk < 0) | (chunk > 1))]
        if outside.size:
            raise wrong(
                path, f"{key} must be in [0, 1] if they are floats, got {outside[0]}", "divide by 255 or store uint8"
            )
    return np.ascontiguousarray(array, dtype=np.float32)


def _features(array: npt.NDArray[Any], key: str, path: Path) -> ImageArray:
    """Check feature vectors [n, D]."""
    if array.ndim != 2 or array.size == 0:
        raise wrong(path, f"{key} must be vectors [n, D], got the shape {array.shape}", "store images as images")
    if array.dtype.kind != "f":
        raise wrong(path, f"{key} must be floats, got {array.dtype}", "convert it")
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are reported below
        vectors = np.ascontiguousarray(array, dtype=np.float32)
    chunks = (vectors[start : start + CHUNK] for start in range(0, len(vectors), CHUNK))
    broken = np.flatnonzero(np.concatenate([~np.isfinite(chunk).all(axis=1) for chunk in chunks]))
    if broken.size:
        raise wrong(
            path,
            f"{key} must be finite float32 numbers, but {broken.size} of {len(vectors)} vectors are not, the first is "
            f"number {broken[0]}",
            "remove or repair them",
        )
    return vectors
