"""Find the files of listed images, and prepare them for a network that was trained on ImageNet."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.sources import dicom
from hyperfl_flwr.data.sources.image_files import CONVERTIBLE, loses_bits, open_image, walk

RESIZED, CROPPED = 256, 224
"""Pixels of an image's shorter side after resizing, and of each side of the square that is cut from its centre."""

LONGEST = 50
"""Largest quotient of an image's sides; the whole image is resized, which would take gigabytes for a narrow strip."""

_SUFFIXES = (".jpg", ".jpeg")


def locate(folder: Path, images: Sequence[str]) -> tuple[list[Path | None], int]:
    """Find the files of images that are given by their ids.

    The file of the id `abcdef` is `a/b/c/abcdef.jpg`, as in Google Landmarks v2; if the folder has no such file, it is
    any file `abcdef.jpg` below the folder, as in iNaturalist 2017.

    Args:
        folder: Folder of the images.
        images: Ids [n].

    Returns:
        The file of each image, None where it is missing, and the number of ids with several files, of which the first
        in alphabetical order is taken.

    Raises:
        DataError: If the folder cannot be read, or has none of the images.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} must be an existing folder of images; check --images")
    needed, repeated = set(images), set()
    files: dict[str, Path] = {}
    try:
        nested = [path if (path := _nested(folder, image)).is_file() else None for image in images]
        if any(nested):
            return nested, 0
        for name in walk(str(folder)):
            path = Path(name)
            if path.suffix.lower() in _SUFFIXES and path.stem in needed:
                if path.stem in files:
                    repeated.add(path.stem)
                files[path.stem] = min(path, files.get(path.stem, path))
    except OSError as error:
        raise DataError(
            f"{error.filename} must be a readable folder: {error.strerror}; check its permissions"
        ) from None
    if not files:
        raise DataError(
            f"{folder} has none of the {len(needed)} listed images; the image {images[0]!r} must be the file "
            f"{images[0]}.jpg anywhere below it, or {_nested(Path(), images[0])}; check --images"
        )
    return [files.get(image) for image in images], len(repeated)


def _nested(folder: Path, image: str) -> Path:
    """Return the place of an image in Google Landmarks v2."""
    name = Path(image).name  # an id never leads out of the folder
    return folder.joinpath(*name[:3], f"{name}.jpg")


def prepared(path: Path) -> npt.NDArray[np.uint8]:
    """Return an image as torchvision's `ImageClassification` crops it, before normalisation: uint8 [3, 224, 224].

    The shorter side is resized to 256 pixels (bilinear), and the square in the centre is cut out.

    Raises:
        DataError: If the file is not an image, damaged, a strip or a DICOM file, has several images, or has more than 8
            bits per channel; its cause is that of `open_image`.
    """
    if path.suffix.lower() == dicom.SUFFIX:
        raise DataError(f"{path} is a DICOM file, whose values have no agreed black and white; convert it to 8 bits")
    with open_image(path, str(path)) as opened:
        # In a JPEG file with several images, the others are previews and stereo views of the first one.
        if opened.format != "MPO" and (frames := getattr(opened, "n_frames", 1)) > 1:
            raise DataError(f"{path} must contain one image, got {frames}; store each in a separate file")
        if max(opened.size) > LONGEST * min(opened.size):
            raise DataError(
                f"{path} must be at most {LONGEST} times as long as wide, got {opened.width}x{opened.height}; crop it"
            )
        if opened.mode not in CONVERTIBLE or loses_bits(opened):
            more = " with more" if loses_bits(opened) else ""
            raise DataError(f"{path} must have 8 bits per channel, got the mode {opened.mode}{more}; convert it")
        image = opened.convert("RGB")
        width, height = image.size
        shorter = min(width, height)
        size = int(RESIZED * width / shorter), int(RESIZED * height / shorter)
        image = image.resize(size, Image.Resampling.BILINEAR)
        left, top = (round((side - CROPPED) / 2) for side in size)
        pixels = np.asarray(image.crop((left, top, left + CROPPED, top + CROPPED)), dtype=np.uint8)
    return pixels.transpose(2, 0, 1)
