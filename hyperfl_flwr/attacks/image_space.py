"""Spaces in which an attack searches for images instead of all their pixels.

Images that are functions of fewer numbers than they have pixels are a prior: what the gradient leaves open, and the
noise in it, is filled with images that the space has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSpace:
    """Images as a differentiable function of latents.

    Attributes:
        draw: Draws initial latents [m, ...] of m images.
        pixels: Maps latents [m, ...] and the constants to images [m, C, H, W], in units in which black is 0 and white
            is 1; it can be called under `torch.func.vmap`.
        constants: Tensors that `pixels` needs, on the CPU; an attack moves them to its device.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    pixels: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    constants: Mapping[str, Tensor] = field(default_factory=dict)


def low_resolution(input_shape: tuple[int, ...], factor: int) -> ImageSpace:
    """Return the images that are enlarged from a lower resolution, with uniform random first images of it.

    Enlarging is linear: R l S^T for each channel l, with bicubic R and S.

    Args:
        input_shape: Shape (C, H, W) of an image.
        factor: Factor by which each side is smaller; sides are rounded up.
    """
    channels, *sides = input_shape
    small = [-(-side // factor) for side in sides]
    rows, columns = (_enlargement(*pair) for pair in zip(small, sides, strict=True))
    return ImageSpace(
        draw=lambda number, generator: torch.rand(number, channels, *small, generator=generator),
        pixels=lambda latents, constants: constants["rows"] @ latents @ constants["columns"].T,
        constants={"rows": rows, "columns": columns},
    )


def _enlargement(small: int, large: int) -> Tensor:
    """Return the matrix [large, small] of bicubic interpolation between pixels' centres along one side."""
    columns = torch.eye(small)[None, :, :, None]
    enlarged: Tensor = functional.interpolate(columns, (large, 1), mode="bicubic", align_corners=False)
    return enlarged[0, :, :, 0].T.contiguous()
