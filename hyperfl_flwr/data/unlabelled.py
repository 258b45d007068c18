"""Somebody's own samples without labels: a folder of images, or an `.npz` file.

A folder is searched with all folders below it; their names are not read as labels. Images must have the size and the
channels of those that the models were trained on: nothing is resized or converted. Of an `.npz` file the keys `images`
or `features` are read as `hyperfl_flwr.data.npz` has them, and no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from hyperfl_flwr.data.cache import fingerprint
from hyperfl_flwr.data.npz import read_samples
from hyperfl_flwr.errors import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""What an image's file name ends with, in small or capital letters."""

_MODES = {1: ("L", "1"), 3: ("RGB",)}
"""Pillow's modes of images with so many channels of 8 bits or fewer."""

_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}


@dataclass(frozen=True, kw_only=True, eq=False)
class Unlabelled:
    """Samples without labels.

    Attributes:
        column: What `names` are: `file` or `index`.
        names: Of each sample its path below the folder, with slashes, or its number in the file.
        samples: float32: images [n, C, H, W] in [0, 1], or feature vectors [n, D]. Shared: not to be written to.
        notes: What was left out, in words.
    """

    column: str
    names: tuple[str, ...]
    samples: npt.NDArray[np.float32]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)


def read_unlabelled(path: Path, input_shape: Sequence[int]) -> Unlabelled:
    """Read a folder of images or an `.npz` file; a second call in the same process returns the same object at once.

    Args:
        path: The folder or the file.
        input_shape: (C, H, W) of the images, or (D,) of the feature vectors, that are wanted.

    Raises:
        DataError: If there is no sample, one cannot be read, has another shape, or holds something that is no number.
    """
    files = _files(path) if path.is_dir() else [path]
    return _read(path, tuple(input_shape), fingerprint([path, *files]))


@lru_cache(maxsize=1)
def _read(path: Path, input_shape: tuple[int, ...], _state: str) -> Unlabelled:
    """Read without looking back: `_state` is in the key so that changed files are read again."""
    found = _read_folder(path, input_shape) if path.is_dir() else _read_npz(path, input_shape)
    if broken := [name for name, fine in zip(found.names, _finite(found.samples), strict=True) if not fine]:
        raise DataError(f"{path}: {len(broken)} samples hold NaN, the first is {broken[0]}; remove or repair them")
    found.samples.flags.writeable = False
    return found


def _finite(samples: npt.NDArray[np.float32]) -> list[bool]:
    return [bool(np.isfinite(sample).all()) for sample in samples]


def _files(folder: Path) -> list[Path]:
    """Return all files below a folder but hidden ones, in the order of their names."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [folder / path for path in sorted(found) if not any(part.startswith(".") for part in path.parts)]


def _read_folder(folder: Path, input_shape: tuple[int, ...]) -> Unlabelled:
    files = _files(folder)
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    if len(input_shape) != 3:
        raise DataError(f"{folder}: the run's samples are feature vectors of {input_shape[0]} numbers; give an .npz")
    if not images:
        raise DataError(
            f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}); give a folder that does, or an .npz"
        )
    names = [path.relative_to(folder).as_posix() for path in images]
    notes = []
    if len(files) > len(images):
        notes.append(f"{len(files) - len(images)} files of {folder} are no images and are left out")
    if any("/" in name for name in names):
        notes.append("images lie in folders below the given one, whose names are not read as labels")
    pixels = np.stack(_pixels(folder, images, input_shape))
    return Unlabelled(
        column="file",
        names=tuple(names),
        samples=pixels.astype(np.float32) / np.float32(255),
        notes=tuple(notes),
    )


def _pixels(folder: Path, paths: Sequence[Path], input_shape: tuple[int, ...]) -> list[npt.NDArray[np.uint8]]:
    """Read images [C, H, W]; all are looked at before one is refused."""
    channels, height, width = input_shape
    found, refused = [], []
    for path in paths:
        try:
            with Image.open(path) as image:
                if image.mode in _MODES.get(channels, ()) and image.size == (width, height):
                    array = np.asarray(image.convert("L") if channels == 1 else image, dtype=np.uint8)
                    found.append(array[None] if channels == 1 else array.transpose(2, 0, 1))
                else:
                    kind = f"{_CHANNELS.get(image.mode, 'other')} channels (mode {image.mode})"
                    refused.append(f"{path.relative_to(folder)}, {image.height}x{image.width} with {kind}")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is no image that can be read: {error}; remove or replace it") from error
    if refused:
        wanted = f"{height}x{width} pixels (height, width) with {channels} channels of 8 bits ({_colour(channels)})"
        raise DataError(
            f"{folder}: images must have {wanted}, as those of the run; {len(refused)} of {len(paths)} have not, the "
            f"first is {refused[0]}; convert them, nothing is resized here"
        )
    return found


def _colour(channels: int) -> str:
    return "grey" if channels == 1 else "RGB"


def _read_npz(path: Path, input_shape: tuple[int, ...]) -> Unlabelled:
    if path.suffix != ".npz":
        what = "is neither a folder nor an .npz file" if path.exists() else "does not exist"
        raise DataError(f"{path} {what}; give a folder of images or an .npz file")
    samples, others = read_samples(path)
    if samples.shape[1:] != input_shape:
        raise DataError(
            f"{path}: samples must have the shape {_shape(input_shape)}, as those of the run, got "
            f"{_shape(samples.shape[1:])}; convert them, nothing is resized here"
        )
    scale = np.float32(255 if samples.dtype == np.uint8 else 1)
    return Unlabelled(
        column="index",
        names=tuple(map(str, range(len(samples)))),
        samples=samples.astype(np.float32) / scale,
        notes=(f"{', '.join(others)} in {path.name} are not used",) if others else (),
    )


def _shape(shape: tuple[int, ...]) -> str:
    """Return a shape as 1x28x28."""
    return "x".join(map(str, shape))
