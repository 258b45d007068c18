"""The conditional generator of PRIV-HFL's data-free distillation, and the files that a run keeps of it.

Najafi et al., PRIV-HFL, section III: the generator of Fang, Song, Shen, Wang, Chen, Song, "Data-Free Adversarial
Distillation" (2019), conditioned on the label as by Zhang et al. (FedFTG, CVPR 2022).
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.targets import ChannelsLast

NOISE_DIM = 100
"""Length of the noise vector z."""


class Generator(nn.Module):
    """Generates images of given classes: x' = G(z, y).

    z and the one-hot y each pass a linear layer to `width` maps of a quarter of the image's sides (rounded up), then
    BatchNorm. Two blocks follow, each of upsampling to double the sides, a 3x3 convolution (to 2 `width` and `width`
    maps), BatchNorm and LeakyReLU 0.2. The output layers are a 3x3 convolution to the image's channels, tanh, and
    BatchNorm without parameters, so that images have mean 0 and variance 1 in each channel of a batch, as normalised
    data do. BatchNorm always uses the statistics of the batch and has no state.

    Args:
        image_shape: (channels, height, width).
        num_classes: Number of classes K.
        width: Number of maps; 64 in the paper's source.
    """

    def __init__(self, image_shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        channels, height, width_of_image = image_shape
        self.num_classes = num_classes
        sides = [(-(-height // part), -(-width_of_image // part)) for part in (4, 2)]
        self.first_shape = (-1, width, *sides[0])
        size = width * sides[0][0] * sides[0][1]
        with torch.device("meta"):
            self.noise = nn.Linear(NOISE_DIM, size)
            self.label = nn.Linear(num_classes, size)
            self.body = nn.Sequential(
                ChannelsLast(),
                _norm(2 * width),
                nn.Upsample(sides[1]),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1),
                _norm(2 * width),
                nn.LeakyReLU(0.2),
                nn.Upsample((height, width_of_image)),
                nn.Conv2d(2 * width, width, 3, padding=1),
                _norm(width),
                nn.LeakyReLU(0.2),
                nn.Conv2d(width, channels, 3, padding=1),
                nn.Tanh(),
                nn.BatchNorm2d(channels, affine=False, track_running_stats=False),
            )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return normalised images [B, C, H, W] of noise [B, 100] and labels [B]; B at least 2."""
        one_hot = (labels[:, None] == torch.arange(self.num_classes, device=labels.device)).to(noise.dtype)
        parts = [self.noise(noise), self.label(one_hot)]
        maps = torch.cat([part.view(self.first_shape) for part in parts], dim=1)
        images: Tensor = self.body(maps)
        return images


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def kept_generator_path(run_directory: Path, server_round: int) -> Path:
    """Return the path where a run keeps its generator's parameters, by name, after a round."""
    return run_directory / "generators" / f"round-{server_round:06d}.npz"


def kept_generators(run_directory: Path) -> dict[int, Path]:
    """Return the paths of the generators that a run has kept, by round in ascending order."""
    paths = sorted((run_directory / "generators").glob("round-*.npz"))
    return {int(path.stem.removeprefix("round-")): path for path in paths}
