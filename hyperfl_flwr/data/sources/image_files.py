"""Find image files and decode them to arrays; shared by all readers of images."""

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
"""File name suffixes of images; upper case is accepted, too."""

_MODES = {1: ("L", "1"), 3: ("RGB",)}
"""Pillow's modes by number of channels (8 bits or fewer each) that need no conversion."""

_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}

_CONVERTIBLE = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes with 8 bits per channel; in modes with more bits, Pillow would clip values above 255."""

Shape = tuple[int, int, int]
"""(channels, height, width)."""


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder except hidden ones, sorted by the parts of their paths.

    Raises:
        DataError: If a folder cannot be read.
    """
    try:
        found = list(_walk(str(folder)))
    except OSError as error:
        raise DataError(
            f"{error.filename} must be a readable folder: {error.strerror}; check its permissions"
        ) from error
    return [Path(path) for path in sorted(found, key=lambda path: path.split("/"))]


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder; follows links to files, but not to folders, which could form cycles."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.is_file():
                yield entry.path


def is_image(path: Path) -> bool:
    """Return True if the suffix of a file name is that of an image."""
    return path.suffix.lower() in SUFFIXES


@contextlib.contextmanager
def open_image(source: Path | IO[bytes], name: str) -> Iterator[Image.Image]:
    """Open an image, and convert all exceptions of Pillow while it is decoded to `DataError`.

    Pillow does not document which exceptions it raises for damaged files, so all are caught.

    Args:
        source: The file, or its content.
        name: Name of the image in errors.

    Raises:
        DataError: If the image is damaged, or far too large.
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
    """Decode images; checks all of them and returns which do not have the required shape.

    Args:
        folder: Folder to which file names in messages are relative.
        paths: The files, at least one.
        input_shape: Required shape; None for the shape of the first image.
        convert: True to convert the channels and resize images of another shape, without keeping their aspect ratio.
            Images with more than 8 bits per channel are never converted, since their scale is unknown.

    Returns:
        The images uint8 [n, C, H, W], undefined for images that do not fit, and a description of each image that does
        not fit.

    Raises:
        DataError: If a file is damaged or contains several images, or if the images do not fit into memory.
        ValueError: If there are no files.
    """
    found: npt.NDArray[np.uint8] | None = None
    refused = []
    for number, path in enumerate(paths):
        with open_image(path, str(path)) as image:
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"{path} must contain one image, got {frames}; store each in a separate file")
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
        raise ValueError("paths must have at least one file, got none")
    return found, refused


def _allocate(folder: Path, count: int, shape: Shape) -> npt.NDArray[np.uint8]:
    """Return an array for images, after checking that it fits into memory (the first image may be unusually large)."""
    try:
        refuse_excess(count * math.prod(shape))
    except MalformedFileError as error:
        raise DataError(
            f"{folder}: {count} images of {describe_shape(shape)} are too large: {error}; shrink them"
        ) from error
    return np.empty((count, *shape), dtype=np.uint8)


def _pixels(image: Image.Image, shape: Shape, *, convert: bool) -> npt.NDArray[np.uint8] | None:
    """Return an image [C, H, W], converted if requested; None if it does not fit."""
    channels, height, width = shape
    fits = image.mode in _MODES.get(channels, ()) and image.size == (width, height)
    if not fits and not (convert and image.mode in _CONVERTIBLE):
        return None
    pixels = image.convert("L" if channels == 1 else "RGB")
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)  # Pillow averages pixels when it shrinks
    array = np.asarray(pixels, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def describe_shape(shape: Shape) -> str:
    """Return a description of images of a shape, for messages."""
    channels, height, width = shape
    colour = "grey" if channels == 1 else "RGB"
    return f"{height}x{width} pixels (height, width) with {channels} channels of 8 bits ({colour})"
