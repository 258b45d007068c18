"""Find image files and decode them to arrays; shared by all readers of images."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files.checked_files import MalformedFileError, refuse_excess
from hyperfl_flwr.data.sources import dicom

SUFFIXES = frozenset({".bmp", dicom.SUFFIX, ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""File name suffixes of images; upper case is accepted, too."""

_MODES = {1: ("L", "1"), 3: ("RGB",)}
"""Pillow's modes by number of channels (8 bits or fewer each) that need no conversion."""

_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}

CONVERTIBLE = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes with 8 bits per channel; in modes with more bits, Pillow would clip values above 255."""

_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
"""Grey modes with more than 8 bits, of which a window says which values are black and white."""

Window = tuple[float, float]
"""Values that become black and white, the first below the second; values outside are cut off."""

Shape = tuple[int, int, int]
"""(channels, height, width)."""


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder except hidden ones, sorted by the parts of their paths.

    Raises:
        DataError: If a folder cannot be read, or an image is a link to nothing.
    """
    try:
        found = list(walk(str(folder)))
    except OSError as error:
        raise DataError(
            f"{error.filename} must be a readable folder: {error.strerror}; check its permissions"
        ) from error
    return [Path(path) for path in sorted(found, key=lambda path: path.split("/"))]


def walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder, without hidden ones and in no order.

    It follows links, but not those to a folder in which they lie, which would be cycles.

    Raises:
        OSError: If a folder cannot be read.
        DataError: If an image is a link to nothing.
    """
    return _walk(folder, frozenset(_identity(parent) for parent in Path(folder).resolve().parents))


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    if (here := _identity(Path(folder))) in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(entry.path, above | {here})
            elif entry.is_file():
                yield entry.path
            elif entry.is_symlink():
                refuse_dead_link(Path(entry.path))


def refuse_dead_link(link: Path) -> None:
    """Refuse a link to an image or a folder that is missing: its images would be left out without a word.

    Raises:
        DataError: If the link's name is that of an image, or has no suffix, as that of a folder.
    """
    if is_image(link) or not link.suffix:
        raise DataError(
            f"{link} is a link to {link.readlink()}, which is missing or cannot be read; make it available, or remove "
            f"the link",
            public="a link to images leads nowhere, see the node's log",
        )


def _identity(folder: Path) -> tuple[int, int]:
    """Return the device and number of a folder, which are the same by whatever path."""
    state = folder.stat()
    return state.st_dev, state.st_ino


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


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """An image that does not have the required shape.

    Attributes:
        text: Its path, size and channels.
        window: Its range of values as `LOW/HIGH`, if it has more than 8 bits and no window was given; otherwise empty.
    """

    text: str
    window: str = ""


def decode(
    folder: Path, paths: Sequence[Path], input_shape: Shape | None, *, convert: bool, window: Window | None = None
) -> tuple[npt.NDArray[np.uint8], list[Misfit]]:
    """Decode images; checks all of them and returns which do not have the required shape.

    Args:
        folder: Folder to which file names in messages are relative.
        paths: The files, at least one.
        input_shape: Required shape; None for the shape of the first image.
        convert: True to convert the channels and resize images of another shape, without keeping their aspect ratio.
        window: Window of grey images with more than 8 bits; without one they do not fit, since their scale is unknown.

    Returns:
        The images uint8 [n, C, H, W], undefined for images that do not fit, and the images that do not fit.

    Raises:
        DataError: If a file is damaged or contains several images, or if the images do not fit into memory.
        ValueError: If there are no files.
    """
    found: npt.NDArray[np.uint8] | None = None
    refused = []
    for number, path in enumerate(paths):
        with _opened(path) as opened:
            image = windowed(opened, window) if window and opened.mode in _DEEP else opened
            is_cut = loses_bits(image)  # before its pixels are read
            shape = input_shape or (1 if image.mode in (*_MODES[1], *_DEEP) else 3, image.height, image.width)
            input_shape = shape
            if found is None:
                found = _allocate(folder, len(paths), shape)
            pixels = None if is_cut else _pixels(image, shape, convert=convert)
            if pixels is None:
                refused.append(_misfit(path.relative_to(folder), image, is_cut=is_cut))
            else:
                found[number] = pixels
    if found is None:
        raise ValueError("paths must have at least one file, got none")
    return found, refused


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image or a DICOM file, see `open_image`; it must have one frame."""
    if path.suffix.lower() == dicom.SUFFIX:
        yield dicom.open_dicom(path)
        return
    with open_image(path, str(path)) as image:
        if (frames := getattr(image, "n_frames", 1)) > 1:
            raise DataError(f"{path} must contain one image, got {frames}; store each in a separate file")
        yield image


def windowed(image: Image.Image, window: Window) -> Image.Image:
    """Return a grey image with more than 8 bits in 8 bits: `window` becomes 0 to 255, values outside are cut off."""
    low, high = window
    shares = np.clip((np.asarray(image, np.float64) - low) / (high - low), 0, 1)
    if image.info.get(dicom.INVERTED):
        shares = 1 - shares
    return Image.fromarray(np.rint(255 * np.nan_to_num(shares)).astype(np.uint8))


def loses_bits(image: Image.Image) -> bool:
    """Return whether an image that was opened, but not read, has more bits per channel than Pillow would keep.

    Of 16 bits in colour or with alpha it keeps the upper 8, so that small values all become 0.
    """
    return image.mode not in _DEEP and any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))


def _misfit(name: Path, image: Image.Image, *, is_cut: bool) -> Misfit:
    size = f"{name}, {image.height}x{image.width}"
    if image.mode not in _DEEP:
        channels = f"{_CHANNELS.get(image.mode, 'other')} channels{' of more than 8 bits' if is_cut else ''}"
        return Misfit(text=f"{size} with {channels} (mode {image.mode})")
    low, high = image.getextrema()
    return Misfit(text=f"{size} with 1 channel of more than 8 bits (mode {image.mode})", window=f"{low:g}/{high:g}")


def window_needed(folder: Path, refused: Sequence[Misfit], count: int, remedy: str) -> str:
    """Return the error for images of which some need a window; empty if none does.

    Args:
        folder: Folder of the images.
        refused: Images that do not fit.
        count: Number of all images.
        remedy: What to do about it; `{}` in it becomes the range of values of the first image, as `LOW/HIGH`.
    """
    deep = [each for each in refused if each.window]
    if not deep:
        return ""
    found = f"{folder}: {len(deep)} of {count} images have more than 8 bits, the first is {deep[0].text}"
    return f"{found}; {remedy.format(deep[0].window)}"


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
    if not fits and not (convert and image.mode in CONVERTIBLE):
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
