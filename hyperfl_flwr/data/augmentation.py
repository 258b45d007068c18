"""Augment a whole batch at once with random crops and flips."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Pad with black, crop to the original size at a random position, and flip left-right with probability 1/2.

    The same distribution as torchvision's RandomCrop(size, padding) and RandomHorizontalFlip, drawn per image, but for
    images that are already normalised.

    Attributes:
        padding: Pixels to add on every side; an image moves by -padding..padding in both directions.
        pad_value: Value of black after normalisation, per channel.
        flip: True to flip images.
    """

    padding: int = 4
    pad_value: tuple[float, ...]
    flip: bool = True

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment a batch.

        Args:
            images: [B, C, H, W], on any device.
            rng: Source of the offsets and flips; they are drawn on the CPU, so that they are the same on every device.

        Returns:
            A new tensor of the same shape, type and device.
        """
        batch, channels, height, width = images.shape
        # One gather with computed pixel positions replaces a crop and a flip per image.
        offsets = rng.integers(0, 2 * self.padding + 1, size=(2, batch, 1))
        flipped = (rng.random((batch, 1)) < 0.5) & self.flip
        rows = offsets[0] + np.arange(height)
        columns = offsets[1] + np.where(flipped, np.arange(width)[::-1], np.arange(width))
        padded_width = width + 2 * self.padding
        pixels = (rows[:, :, None] * padded_width + columns[:, None, :]).reshape(batch, 1, height * width)
        positions = torch.from_numpy(pixels).to(images.device).expand(batch, channels, height * width)
        padded = self._pad(images).reshape(batch, channels, -1)
        return padded.gather(2, positions).reshape(images.shape)

    def _pad(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        inner = slice(self.padding, self.padding + height), slice(self.padding, self.padding + width)
        black = torch.tensor(self.pad_value, dtype=images.dtype, device=images.device).reshape(1, channels, 1, 1)
        padded = black.repeat(batch, 1, height + 2 * self.padding, width + 2 * self.padding)
        padded[:, :, inner[0], inner[1]] = images
        return padded
