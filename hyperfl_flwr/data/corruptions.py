"""Five corruptions of images, as another sensor or surrounding would cause them.

"Inference-Time Personalized Federated Learning" (under review at ICLR 2022), section 6.6, corrupts the data of novel
clients, those that the descriptor is made of and those that are tested on, and no others. Every image draws its own
parameter, as torchvision's random transforms do; the paper does not say whether a client's images share one.

The transforms are torchvision's, on images with values in [0, 1]; what they make brighter than white stays white.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.core.errors import DataError

CORRUPTIONS: dict[str, tuple[float, float]] = {
    "blur": (0.1, 2.0),
    "rotation": (0.0, 15.0),
    "brightness": (0.5, 1.5),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
}
"""Name -> smallest and largest parameter: the standard deviation in pixels of a Gaussian filter of 7x7 pixels, degrees
anticlockwise (nearest pixel, black where nothing was), factors."""

KERNEL_SIZE = 7

Transform = Callable[[Tensor, float], Tensor]


def require_corruption(name: str, channels: int) -> None:
    """Check that images can be corrupted in a way.

    Args:
        name: A key of `CORRUPTIONS`.
        channels: Of the images.

    Raises:
        DataError: If there is no such corruption, or it is defined for other numbers of channels only. Grey images have
            no saturation: torchvision would return them as they are, and a result would say nothing.
    """
    if name not in CORRUPTIONS:
        raise DataError(f"there is no corruption {name!r}; known: {', '.join(CORRUPTIONS)}")
    if name == "saturation" and channels != 3:
        raise DataError(f"the saturation of images with {channels} channels cannot be changed; it takes 3, colours")
    if name in ("brightness", "contrast") and channels not in (1, 3):
        raise DataError(f"the {name} of images with {channels} channels cannot be changed; it takes 1 or 3")


def corrupted(
    images: Tensor, name: str, rng: np.random.Generator, *, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Corrupt images, each with a parameter of its own.

    Args:
        images: [n, C, H, W], normalised with `mean` and `std`, on any device.
        name: A key of `CORRUPTIONS`.
        rng: Source of the parameters, drawn uniformly on the CPU, so that every device gets the same ones.
        mean: Per channel, of images scaled to [0, 1].
        std: Per channel, of images scaled to [0, 1].

    Returns:
        A new tensor of the same shape, type and device, normalised in the same way.

    Raises:
        DataError: See `require_corruption`.
    """
    require_corruption(name, images.shape[1])
    parameters = rng.uniform(*CORRUPTIONS[name], size=len(images))
    if not len(images):
        return images.clone()
    shift, scale = (
        torch.tensor(each, dtype=images.dtype, device=images.device).reshape(-1, 1, 1) for each in (mean, std)
    )
    transform = _transform(name)
    raw = images * scale + shift
    changed = torch.stack([transform(image, float(value)) for image, value in zip(raw, parameters, strict=True)])
    return (changed - shift) / scale


def _transform(name: str) -> Transform:
    from torchvision.transforms import functional  # deferred: costs a second that most processes need not spend

    if name == "blur":
        return lambda image, sigma: functional.gaussian_blur(image, [KERNEL_SIZE, KERNEL_SIZE], [sigma, sigma])
    transforms: dict[str, Transform] = {
        "rotation": functional.rotate,
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
    }
    return transforms[name]
