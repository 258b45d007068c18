"""Apply one of five corruptions to images, as another sensor or environment would cause them.

"Inference-Time Personalized Federated Learning" (under review at ICLR 2022), section 6.6, corrupts the data of novel
clients, both the samples of the descriptor and the test samples, and no other data. Each image has a separate random
parameter, as in torchvision's random transforms; the paper does not say whether a client's images share one.

The transforms are torchvision's, for images with values in [0, 1]; values brighter than white are clipped to white.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hyperfl_flwr.core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    Transform = Callable[[Tensor, float], Tensor]

CORRUPTIONS: dict[str, tuple[float, float]] = {
    "blur": (0.1, 2.0),
    "rotation": (0.0, 15.0),
    "brightness": (0.5, 1.5),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
}
"""Smallest and largest parameter of each corruption: the standard deviation in pixels of a Gaussian filter of 7x7
pixels (blur), degrees anticlockwise (rotation; nearest pixel, uncovered pixels are black), or factors."""

KERNEL_SIZE = 7


def require_corruption(name: str, channels: int) -> None:
    """Check that a corruption exists and is defined for the images.

    Args:
        name: A key of `CORRUPTIONS`.
        channels: Number of channels of the images.

    Raises:
        DataError: If there is no such corruption, or it is not defined for this number of channels. Grey images have no
            saturation: torchvision would return them unchanged, and the result would be meaningless.
    """
    if name not in CORRUPTIONS:
        raise DataError(f"the corruption must be one of {', '.join(CORRUPTIONS)}, got {name!r}")
    if name == "saturation" and channels != 3:
        raise DataError(f"the corruption saturation needs images with 3 channels (colour), got {channels} channels")
    if name in ("brightness", "contrast") and channels not in (1, 3):
        raise DataError(f"the corruption {name} needs images with 1 or 3 channels, got {channels} channels")


def corrupted(
    images: "Tensor", name: str, rng: np.random.Generator, *, mean: Sequence[float], std: Sequence[float]
) -> "Tensor":
    """Corrupt images, each with a separate random parameter.

    Args:
        images: [n, C, H, W], normalised with `mean` and `std`, on any device.
        name: A key of `CORRUPTIONS`.
        rng: Source of the parameters; they are drawn uniformly on the CPU, so that they are the same on every device.
        mean: Mean per channel of images scaled to [0, 1].
        std: Standard deviation per channel of images scaled to [0, 1].

    Returns:
        A new tensor of the same shape, type and device, normalised in the same way.

    Raises:
        DataError: See `require_corruption`.
    """
    import torch  # deferred: settings are checked against the names without it

    require_corruption(name, images.shape[1])
    parameters = rng.uniform(*CORRUPTIONS[name], size=len(images))
    if not len(images):
        return images.clone()
    shift, scale = (
        torch.tensor(values, dtype=images.dtype, device=images.device).reshape(-1, 1, 1) for values in (mean, std)
    )
    transform = _transform(name)
    raw = images * scale + shift
    changed = torch.stack([transform(image, float(value)) for image, value in zip(raw, parameters, strict=True)])
    return (changed - shift) / scale


def _transform(name: str) -> "Transform":
    from torchvision.transforms import functional  # deferred: the import takes a second, and few processes need it

    if name == "blur":
        return lambda image, sigma: functional.gaussian_blur(image, [KERNEL_SIZE, KERNEL_SIZE], [sigma, sigma])
    transforms: dict[str, Transform] = {
        "rotation": functional.rotate,
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
    }
    return transforms[name]
