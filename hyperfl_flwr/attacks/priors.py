"""Image priors for gradient inversion."""

from torch import Tensor


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of images [..., H, W], vertical plus horizontal.

    The anisotropic total variation of Geiping et al. (2020, section 4), in units of the images' values.
    """
    vertical = images.diff(dim=-2).abs().mean()
    horizontal = images.diff(dim=-1).abs().mean()
    return vertical + horizontal
