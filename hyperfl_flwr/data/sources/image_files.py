"""Images as files: which files are images, and how they become arrays, for every reader of images."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image

from hyperfl_flwr.core.checked_files import MalformedFileError, refuse_excess
from hyperfl_flwr.core.errors import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""What an image's file name ends with, in small or capital letters."""

_MODES = {1: ("L", "1"), 3: ("RGB",)}
"""Pillow's modes of images with so many channels of 8 bits or fewer, that are read as they are."""

_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}

_CONVERTIBLE = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes of 8 bits per channel; Pillow would cut off what lies above 255 of those with more."""

Shape = tuple[int, int, int]
"""(channels, height, width)."""


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder but hidden ones, in the order of their names (part by part).

    Raises:
        DataError: If a folder cannot be read.
    """
    try:
        found = list(_walk(str(folder)))
    except OSError as error:
        raise DataError(f"{error.filename}: must be a folder that can be read: {error.strerror}") from error
    return [Path(path) for path in sorted(found, key=lambda path: path.split("/"))]


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder; links are followed to files but not to folders, which may lead in circles."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.is_file():
                yield entry.path


def is_image(path: Path) -> bool:
    """Say whether a file's name is an image's."""
    return path.suffix.lower() in SUFFIXES


@contextlib.contextmanager
def open_image(source: Path | IO[bytes], name: str) -> Iterator[Image.Image]:
    """Open an image, and turn whatever Pillow raises while it is decoded into `DataError`; there is no list of it.

    Args:
        source: The file, or its content.
        name: How errors name it.

    Raises:
        DataError: If it is damaged, or far too large.
    """
    try:
        with Image.open(source) as image:
            yield image
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name} must be an image, but reading it failed: {reason}; remove or replace it") from error


def decode(
    folder: Path, paths: Sequence[Path], input_shape: Shape | None, *, convert: bool
) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Read images; all are looked at before the caller is told which do not fit.

    Args:
        folder: Names of files are told as seen from here.
        paths: The files, at least one.
        input_shape: What they must have; None for what the first of them has.
        convert: Whether channels are converted and the image is resized, whatever its own aspect, where they differ.
            Images of more than 8 bits per channel are never converted: how they are to be scaled is not known here.

    Returns:
        uint8 [n, C, H, W], meaningless where an image did not fit; and of each that did not, which and why.

    Raises:
        DataError: If a file is damaged or holds several images, or they do not fit into memory together.
    """
    found: npt.NDArray[np.uint8] | None = None
    refused = []
    for number, path in enumerate(paths):
        with open_image(path, str(path)) as image:
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"{path} holds {frames} images; store each in a file of its own")
            shape = input_shape or (1 if image.mode in _MODES[1] else 3, image.height, image.width)
            input_shape = shape
            if found is None:
                found = _allocate(folder, len(paths), shape)
            pixels = _pixels(image, shape, convert=convert)
            if pixels is None:
                kind = f"{_CHANNELS.get(image.mode, 'other')} channels (mode {image.mode})"
                refused.append(f"{path.relative_to(folder)}, {image.height}x{image.width} with {kind}")
            else:
                found[number] = pixels
    if found is None:
        raise ValueError("there must be a file to read")
    return found, refused


def _allocate(folder: Path, count: int, shape: Shape) -> npt.NDArray[np.uint8]:
    """Return an array for images, of which the first, which has given the shape, may be far larger than the others."""
    try:
        refuse_excess(count * math.prod(shape))
    except MalformedFileError as error:
        raise DataError(f"{folder}: {count} images of {wanted(shape)} are too many: {error}; shrink them") from error
    return np.empty((count, *shape), dtype=np.uint8)


def _pixels(image: Image.Image, shape: Shape, *, convert: bool) -> npt.NDArray[np.uint8] | None:
    """Return an image [C, H, W]; None if it does not fit."""
    channels, height, width = shape
    fits = image.mode in _MODES.get(channels, ()) and image.size == (width, height)
    if not fits and not (convert and image.mode in _CONVERTIBLE):
        return None
    pixels = image.convert("L" if channels == 1 else "RGB")
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)  # averages where it makes images smaller
    array = np.asarray(pixels, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def wanted(shape: Shape) -> str:
    """Return what images of a shape are, in words."""
    channels, height, width = shape
    colour = "grey" if channels == 1 else "RGB"
    return f"{height}x{width} pixels (height, width) with {channels} channels of 8 bits ({colour})"
