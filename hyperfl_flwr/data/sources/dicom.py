"""Open DICOM files (`.dcm`) as images, with pydicom (the optional extra `dicom`)."""

from pathlib import Path

import numpy as np
from PIL import Image

from hyperfl_flwr.core.errors import DataError

SUFFIX = ".dcm"

INVERTED = "inverted"
"""Key in an image's `info` if its smallest value is white (photometric interpretation MONOCHROME1)."""


def open_dicom(path: Path) -> Image.Image:
    """Return the image of a DICOM file.

    Grey images are in the units of the file: stored values times rescale slope plus intercept, for example Hounsfield
    units. Nothing but the pixels is read from the file, so no name of a patient.

    Args:
        path: The file; it must have one frame.

    Returns:
        A grey image in mode `F`, or in mode `L` if it has 8 bits, or a colour image in mode `RGB`.

    Raises:
        DataError: If pydicom is not installed, or the file has no image that it can decode.
    """
    try:
        import pydicom
    except ImportError:
        raise DataError(
            f"{path} is a DICOM file, which needs pydicom; install it: python -m pip install 'pydicom>=3,<4'",
            public="its DICOM files need pydicom",
        ) from None
    try:
        found = pydicom.dcmread(path)
        if (frames := int(found.get("NumberOfFrames") or 1)) > 1:
            raise DataError(f"{path} must contain one image, got {frames}; store each in a separate file")
        pixels, kind = found.pixel_array, str(found.PhotometricInterpretation)
        if pixels.ndim == 3:  # pydicom has converted it to RGB, whatever kind is stored
            if pixels.dtype != np.uint8:
                raise DataError(f"{path} must have colours of 8 bits, got {pixels.dtype}; convert it")
            return Image.fromarray(np.ascontiguousarray(pixels), "RGB")
        if not kind.startswith("MONOCHROME"):
            raise DataError(f"{path} must be a grey or colour image, got one of the kind {kind}; convert it")
        if "ModalityLUTSequence" in found or "SharedFunctionalGroupsSequence" in found:
            raise DataError(
                f"{path} must have its values by rescale slope and intercept; convert it to a classic image"
            )
        slope, intercept = float(found.get("RescaleSlope") or 1), float(found.get("RescaleIntercept") or 0)
        if pixels.dtype == np.uint8 and (slope, intercept) == (1, 0):
            return Image.fromarray(255 - pixels if kind == "MONOCHROME1" else pixels)
        image = Image.fromarray((pixels.astype(np.float64) * slope + intercept).astype(np.float32))
    except DataError:
        raise
    except Exception as error:  # pydicom does not document which exceptions it raises for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path} must be a DICOM image, but reading it failed: {reason}; remove or replace it"
        ) from error
    image.info[INVERTED] = kind == "MONOCHROME1"
    return image
