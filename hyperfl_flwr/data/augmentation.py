"""Augment a whole batch at once with random crops and flips."""

from collections.abc import Sequence
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

    def draw(self, sizes: Sequence[int], rng: np.random.Generator) -> Tensor:
        """Draw the changes of the images of some batches, on the CPU, so that they are the same on every device.

        Args:
            sizes: Numbers of images, in the order of the batches.
            rng: Source of the offsets and flips.

        Returns:
            Rows (top, left, flipped) of all images, int64 [n, 3]: the offsets of the crop in the padded image, and 1
            for a flipped image.
        """
        drawn = []
        for size in sizes:
            offsets = rng.integers(0, 2 * self.padding + 1, size=(2, size))
            drawn.append(np.stack((*offsets, (rng.random(size) < 0.5) & self.flip), axis=1))
        return torch.from_numpy(np.concatenate(drawn))

    def all_changes(self) -> Tensor:
        """Return the rows of all changes that `draw` can draw, int64 [n, 3]: each position, plain and flipped."""
        offsets = torch.arange(2 * self.padding + 1)
        return torch.cartesian_prod(offsets, offsets, torch.arange(2 if self.flip else 1))

    def __call__(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Augment a batch.

        Args:
            images: [B, C, H, W], on any device.
            drawn: Their rows [B, 3] of `draw`, on the same device.

        Returns:
            A new tensor of the same shape, type and device.
        """
        batch, channels, height, width = images.shape
        # One gather with computed pixel positions replaces a crop and a flip per image.
        top, left, flipped = drawn[:, :, None].unbind(dim=1)
        rows = top + torch.arange(height, device=images.device)
        column = torch.arange(width, device=images.device)
        columns = left + torch.where(flipped > 0, width - 1 - column, column)
        padded_width = width + 2 * self.padding
        pixels = (rows[:, :, None] * padded_width + columns[:, None, :]).reshape(batch, 1, height * width)
        padded = self._pad(images).reshape(batch, channels, -1)
        return padded.gather(2, pixels.expand(batch, channels, height * width)).reshape(images.shape)

    def _pad(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        padded = images.new_empty(batch, channels, height + 2 * self.padding, width + 2 * self.padding)
        for channel, black in enumerate(self.pad_value):
            padded[:, channel].fill_(black)  # a tensor of these values would be sent to the device for every batch
        padded[:, :, self.padding : self.padding + height, self.padding : self.padding + width] = images
        return padded
