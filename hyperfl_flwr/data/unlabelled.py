"""Read custom samples without labels from a folder of images, an `.npz` or a CSV file.

A folder is searched recursively; the names of its folders are not read as labels. Images must have the size and the
channels of the images that the models were trained on; they are resized or converted only on request. In an `.npz`
file, only the key `images` or `features` is read, in the format of `hyperfl_flwr.data.sources.npz`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.cache import fingerprint
from hyperfl_flwr.data.sources.csv_header import require_features
from hyperfl_flwr.data.sources.csv_table import SUFFIX, read_table
from hyperfl_flwr.data.sources.image_files import (
    SUFFIXES,
    Shape,
    decode,
    describe_shape,
    files_below,
    is_image,
    window_needed,
)
from hyperfl_flwr.data.sources.npz import read_samples

WINDOW = "the run was trained on images of 8 bits; convert these as its images were (their first has the values {})"
"""What to do about images with more than 8 bits, where the run had no window."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unlabelled:
    """Samples without labels.

    Attributes:
        column: Kind of the names: `file` or `index`.
        names: Name of each sample: its path below the folder, with slashes, or its number in the file.
        samples: float32: images [n, C, H, W] in [0, 1], or feature vectors [n, D]. Shared; must not be written to.
        notes: Notes for the user about files or keys that were left out.
        features: Names of the features; empty if they have none.
    """

    column: str
    names: tuple[str, ...]
    samples: npt.NDArray[np.float32]
    notes: tuple[str, ...]
    features: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def read_unlabelled(
    path: Path,
    input_shape: Sequence[int],
    *,
    convert: bool = False,
    labelled: bool = False,
    window: tuple[float, float] | None = None,
    features: Sequence[str] = (),
) -> Unlabelled:
    """Read a folder of images or an `.npz` file; a second call in the same process returns the same object.

    Args:
        path: The folder or the file.
        input_shape: Required shape: (C, H, W) of images, or (D,) of feature vectors.
        convert: True to convert and resize images of a folder that have another shape, like `folder:` data with
            `data.input-shape`.
        labelled: True if the caller reads the labels separately, so that no note reports them as unused.
        window: Values of grey images with more than 8 bits that become 0 and 1; None to refuse such images.
        features: Names that the columns of a CSV file must have, in this order; empty for any.

    Raises:
        DataError: If there are no samples, or if a sample cannot be read, has another shape or other features, or has a
            value that is not finite.
    """
    files = files_below(path) if path.is_dir() else [path]
    found = _read(path, tuple(input_shape), convert, labelled, window, fingerprint([path, *files]))
    require_features(found.features, features, str(path))
    return found


@lru_cache(maxsize=1)
def _read(
    path: Path,
    input_shape: tuple[int, ...],
    convert: bool,
    labelled: bool,
    window: tuple[float, float] | None,
    _state: str,
) -> Unlabelled:
    """Read samples; `_state` is only a part of the cache key, so that changed files are read again."""
    if path.suffix == SUFFIX:
        found = _read_csv(path, input_shape)
    elif path.is_dir():
        found = _read_folder(path, input_shape, convert=convert, labelled=labelled, window=window)
    else:
        found = _read_npz(path, input_shape, labelled=labelled)
    if broken := [name for name, fine in zip(found.names, _finite(found.samples), strict=True) if not fine]:
        raise DataError(
            f"{path}: all samples must be finite, but {len(broken)} are not, the first is {broken[0]}; remove or "
            f"repair them"
        )
    found.samples.flags.writeable = False  # the cache shares them between callers
    return found


def _finite(samples: npt.NDArray[np.float32]) -> list[bool]:
    return [bool(np.isfinite(sample).all()) for sample in samples]


def _read_folder(
    folder: Path, input_shape: tuple[int, ...], *, convert: bool, labelled: bool, window: tuple[float, float] | None
) -> Unlabelled:
    files = files_below(folder)
    images = [path for path in files if is_image(path)]
    if len(input_shape) != 3:
        raise DataError(
            f"{folder}: the run's samples are feature vectors of {input_shape[0]} numbers, got a folder; give an .npz "
            f"file"
        )
    if not images:
        raise DataError(
            f"{folder} contains no images ({', '.join(sorted(SUFFIXES))}); give a folder with images, or an .npz file"
        )
    names = [path.relative_to(folder).as_posix() for path in images]
    notes = []
    if len(files) > len(images):
        notes.append(f"{len(files) - len(images)} files of {folder} are not images and are left out")
    if not labelled and any("/" in name for name in names):
        notes.append("images lie in folders below the given one; the names of these folders are not read as labels")
    shape = (input_shape[0], input_shape[1], input_shape[2])
    pixels = _pixels(folder, images, shape, convert=convert, window=window)
    return Unlabelled(
        column="file",
        names=tuple(names),
        samples=pixels.astype(np.float32) / np.float32(255),
        notes=tuple(notes),
    )


def _pixels(
    folder: Path, paths: Sequence[Path], input_shape: Shape, *, convert: bool, window: tuple[float, float] | None
) -> npt.NDArray[np.uint8]:
    """Read images [n, C, H, W]; checks all of them before refusing, so that the error counts all that do not fit."""
    found, refused = decode(folder, paths, input_shape, convert=convert, window=window)
    if problem := window_needed(folder, refused, len(paths), WINDOW):
        raise DataError(problem)
    if refused and convert:
        raise DataError(
            f"{folder}: images must be grey or in colour with 8 bits per channel to be converted; {len(refused)} of "
            f"{len(paths)} are not, the first is {refused[0].text}; convert them"
        )
    if refused:
        raise DataError(
            f"{folder}: images must have {describe_shape(input_shape)}, like those of the run; "
            f"{len(refused)} of {len(paths)} do not, the first is {refused[0].text}; convert them, as "
            f"`hyperfl predict --convert` does"
        )
    return found


def _read_csv(path: Path, input_shape: tuple[int, ...]) -> Unlabelled:
    table = read_table(path)
    if table.features.shape[1:] != input_shape:
        raise DataError(
            f"{path}: samples must have the shape {_shape(input_shape)}, like those of the run, got "
            f"{table.features.shape[1]} columns of numbers; give the columns of the run, in its order"
        )
    return Unlabelled(
        column="index",
        names=tuple(map(str, range(len(table.features)))),
        samples=table.features,
        notes=(),
        features=table.names,
    )


def _read_npz(path: Path, input_shape: tuple[int, ...], *, labelled: bool) -> Unlabelled:
    if path.suffix != ".npz":
        problem = "is neither a folder nor an .npz or .csv file" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}; give a folder of images, an .npz or a .csv file")
    samples, others = read_samples(path)
    if samples.shape[1:] != input_shape:
        raise DataError(
            f"{path}: samples must have the shape {_shape(input_shape)}, like those of the run, got "
            f"{_shape(samples.shape[1:])}; convert them, since samples are not resized here"
        )
    others = [name for name in others if not (labelled and name == "labels")]
    scale = np.float32(255 if samples.dtype == np.uint8 else 1)
    return Unlabelled(
        column="index",
        names=tuple(map(str, range(len(samples)))),
        samples=samples.astype(np.float32) / scale,
        notes=(f"{', '.join(others)} in {path.name} are not used",) if others else (),
    )


def _shape(shape: tuple[int, ...]) -> str:
    """Return a shape as a text such as 1x28x28."""
    return "x".join(map(str, shape))
