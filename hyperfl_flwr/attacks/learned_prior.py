"""A space of images that is learned from public images of another data set.

An autoencoder with convolutions only is trained on images that anyone can get. What its decoder has learned is local,
edges and areas, so that it also draws images of other data sets. Its codes have a quarter of the numbers of an image.
They are normalised, and noisy in training, so that standard normal codes and small changes of a code give images.

The attack is this project's; gradient inversion in the latent space of a generative model is by Jeon, Kim, Lee, Oh, Ok:
"Gradient Inversion with Generative Image Prior", NeurIPS 2021, where the model is trained on images like the private
ones.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.attacks.image_space import ImageSpace
from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import ordinary_parameters

_CODE_SHARE = 4
"""Factor by which a code has fewer numbers than an image: maps of a quarter of the sides, 4 for each colour channel."""


@dataclass(frozen=True, kw_only=True)
class PriorTraining:
    """Settings of the training.

    Attributes:
        steps: Number of steps of Adam; its rate falls to a tenth along a cosine.
        batch_size: Number of images of a step.
        learning_rate: First rate of Adam.
        noise: Standard deviation of the noise on the codes, which have the standard deviation 1.
        width: Number of maps of the widest layer.
        seed: Seed of the initial parameters, the batches and the noise.
    """

    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 3e-3
    noise: float = 0.1
    width: int = 64
    seed: int = 0


def train_decoder(images: Tensor, training: PriorTraining, progress: Progress | None = None) -> dict[str, Tensor]:
    """Train an autoencoder, and return the parameters of its decoder.

    Args:
        images: Public images float32 [n, C, H, W] in [0, 1].
        training: Settings of the training.
        progress: Called with the number of steps done and their total, every fifty steps.

    Returns:
        The parameters by name; the same on each call with the same torch on the same machine.
    """
    shape = tuple(images.shape[1:])
    network = nn.ModuleDict({"encoder": _encoder(shape, training.width), "decoder": _decoder(shape, training.width)})
    network.load_state_dict(ordinary_parameters(network, torch_generator(training.seed, "prior")), assign=True)
    optimiser = Adam(network.parameters(), lr=training.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, training.steps, training.learning_rate / 10)
    generator = torch_generator(training.seed, "prior", "batches")
    for step in range(1, training.steps + 1):
        batch = images[torch.randint(len(images), (training.batch_size,), generator=generator)]
        codes = network["encoder"](batch)
        noisy = codes + training.noise * torch.randn(codes.shape, generator=generator)
        loss = functional.mse_loss(network["decoder"](noisy), batch)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch's function has no types
        optimiser.step()
        schedule.step()
        if progress is not None and (step % 50 == 0 or step == training.steps):
            progress(step, training.steps)
    return {name: value.detach().clone() for name, value in network["decoder"].named_parameters()}


def learned_space(input_shape: tuple[int, ...], decoder: Mapping[str, Tensor], width: int) -> ImageSpace:
    """Return the images that a trained decoder draws; the first ones are of standard normal codes.

    Args:
        input_shape: Shape (C, H, W) of an image.
        decoder: Parameters of `train_decoder`, by name.
        width: Number of maps of the decoder's widest layer.
    """
    network = _decoder(input_shape, width)
    code = (_CODE_SHARE * input_shape[0], *_halved(_halved(input_shape[1:])))

    def pixels(latents: Tensor, constants: Mapping[str, Tensor]) -> Tensor:
        images: Tensor = functional_call(network, dict(constants), (latents,))
        return images

    return ImageSpace(
        draw=lambda number, generator: torch.randn(number, *code, generator=generator), pixels=pixels, constants=decoder
    )


def _encoder(input_shape: tuple[int, ...], width: int) -> nn.Module:
    """Return the network from images to codes, on the meta device; normalised by the statistics of the batch."""
    channels = input_shape[0]
    with torch.device("meta"):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, width // 2, 3, stride=2, padding=1),
                act1=nn.SiLU(),
                conv2=nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
                act2=nn.SiLU(),
                conv3=nn.Conv2d(width, _CODE_SHARE * channels, 1),
                norm=nn.BatchNorm2d(_CODE_SHARE * channels, affine=False, track_running_stats=False),
            )
        )


def _decoder(input_shape: tuple[int, ...], width: int) -> nn.Module:
    """Return the network from codes to images, on the meta device."""
    channels, *sides = input_shape
    with torch.device("meta"):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(_CODE_SHARE * channels, width, 3, padding=1),
                act1=nn.SiLU(),
                up1=nn.Upsample(_halved(sides)),
                conv2=nn.Conv2d(width, width // 2, 3, padding=1),
                act2=nn.SiLU(),
                up2=nn.Upsample(tuple(sides)),
                conv3=nn.Conv2d(width // 2, channels, 3, padding=1),
                output=nn.Sigmoid(),
            )
        )


def _halved(sides: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(-(-side // 2) for side in sides)
