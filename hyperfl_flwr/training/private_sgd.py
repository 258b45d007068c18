"""Local SGD with differential privacy for single samples (DP-SGD).

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy", CCS 2016, algorithm
1. A step draws a Poisson batch S, which has every sample with probability q, independently, and takes

    g = [ sum_{x in S} g_x min(1, C / |g_x|) + N(0, sigma^2 C^2 I) ] / B

as its gradient, where g_x is the gradient of one sample's loss over all parameters that are trained with noise, and B
is the setting `batch-size`, also for a client with fewer samples.

Two data sets are neighbours if they differ in one record, which is present in one and has no effect in the other: its
gradient is zero ("zero-out"). Their number of records n is the same and public. The probability q = min(1, B / n), the
number of steps and the noise multiplier sigma follow from n. One record moves the sum by at most C. What follows, force
and pull, weight decay and momentum, does not depend on samples. An empty batch is a step, too.

Batches, noise, augmentation and dropout take their random numbers from the operating system: a run's seed is known to
the server, and all of them must be unknown for the bound to hold. Two equal runs therefore differ. The noise consists
of floating-point numbers, which does not give a strict guarantee (Mironov, CCS 2012).
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.noise.gaussian_noise import gaussian_tensor
from hyperfl_flwr.core.setting_types import CLIP_NORMS
from hyperfl_flwr.models.layers.dropout import seed_dropout
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, TrainingData, add_forces, new_optimiser, run_epochs
from hyperfl_flwr.training.per_example import PerExampleGradients


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """Clipping and noise of each step.

    Attributes:
        clip_norm: Clipping norm C of one sample's gradient over all parameters that are trained with noise,
            in the range `CLIP_NORMS`.
        noise_multiplier: Standard deviation sigma of the noise on the sum of a batch, in units of C; at least 0.
    """

    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: If a number is out of range.
        """
        low, high = CLIP_NORMS
        if not (low <= self.clip_norm <= high and 0 <= self.noise_multiplier < math.inf):
            raise ValueError(
                f"clip_norm must be from {low:g} to {high:g}, and noise_multiplier at least 0 and finite, got "
                f"{self.clip_norm} and {self.noise_multiplier}"
            )


@dataclass(frozen=True, kw_only=True)
class Companion:
    """Private parameters that are trained in the same steps without a gradient of their own.

    Attributes:
        part: The parameters; `clip_norm` is not used.
        like: For each of them, a parameter of the noisy sets with the same gradient; they take its noisy gradient,
            which costs no privacy. None to take their own gradient of the batch, without clipping and noise.
    """

    part: ParameterSet
    like: Sequence[Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class NoisyEpochs:
    """Result of noisy steps.

    Attributes:
        loss: Mean loss of the samples in the batches of the last pass (with `Epochs.steps` of all steps), in nats, each
            batch before its step; of all samples, after the last step, if no batch had one. It has no noise.
        steps: Number of steps that were taken.
    """

    loss: float
    steps: int


def sample_rate(num_examples: int, batch_size: int) -> float:
    """Return the probability q with which each of n samples is in a Poisson batch: min(1, B / n)."""
    return min(1.0, batch_size / num_examples)


def poisson_batches(data: TrainingData, batch_size: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the Poisson batches of one pass as (images, labels): as many as `batches` yields, some may be empty.

    Which samples they have comes from the operating system's random numbers; `rng` is for augmentation alone.
    """
    size = len(data.train_labels)
    # A random 64-bit integer is below q 2^64 with probability q; the last float64 below 1 keeps the product in range.
    bound = np.uint64(min(sample_rate(size, batch_size), math.nextafter(1, 0)) * 2.0**64)
    everyone = batch_size >= size
    for _ in range(math.ceil(size / batch_size)):
        drawn = np.frombuffer(os.urandom(8 * size), np.uint64) < bound
        index = send(torch.from_numpy(np.flatnonzero(drawn | everyone)), data.train_labels.device)
        images, change = data.train_images[index], data.augmentation
        if change is not None and len(index):
            images = change(images, send(change.draw([len(index)], rng), images.device))
        yield images, data.train_labels[index]


def train_private_epochs(
    network: nn.Module,
    sets: Sequence[ParameterSet],
    data: TrainingData,
    epochs: Epochs,
    noise: StepNoise,
    companions: Sequence[Companion] = (),
) -> NoisyEpochs:
    """Minimise the mean cross-entropy by noisy steps, changing the parameters in place.

    Args:
        network: The classifier, in the mode in which it is trained.
        sets: The parameters to train with noise. Their gradients are clipped together, by `noise.clip_norm` instead of
            the sets' own clipping norms.
        data: The client's training samples, at least one.
        epochs: Length and settings of the training; `epochs.batch_size` is B, the expected size of a batch if
            there are at least as many samples.
        noise: Clipping and noise.
        companions: Parameters of the network that are trained in the same steps.

    Raises:
        ValueError: If the network is not supported, see `PerExampleGradients`, or samples are weighted: Poisson batches
            have all samples with the same probability.
    """
    if data.train_weights is not None:
        raise ValueError("noisy steps cannot weight samples; train with dp.epsilon = 0, or without weights")
    own = np.random.default_rng()  # seeded by the operating system
    seed_dropout([network], torch.Generator().manual_seed(int(own.integers(2**63))))
    parameters = [parameter for part in sets for parameter in part.parameters]
    gradients = PerExampleGradients(network, parameters, data.train_images[:1])
    optimiser = new_optimiser([*sets, *(companion.part for companion in companions)], epochs)

    taken, size = 0, epochs.batch_size  # not that of a batch, which is private

    def mean(losses: Tensor) -> Tensor:
        # A loss that is not finite counts as zero, as the sample's gradient does.
        return losses.nan_to_num(nan=0.0, posinf=0.0).sum() / max(1, len(losses))

    def step(images: Tensor, labels: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        for companion in companions:
            if companion.like is None:
                _assign(companion.part.parameters, _plain(network, companion.part.parameters, images, labels), size)
        found = gradients.clipped_sums(images, labels, noise.clip_norm)
        _assign(parameters, _noised(found.sums, noise), size)
        for companion in companions:
            if companion.like is not None:
                for parameter, like in zip(companion.part.parameters, companion.like, strict=True):
                    parameter.grad = None if like.grad is None else like.grad.clone()
        for part in (*sets, *(companion.part for companion in companions)):
            add_forces(part)
        optimiser.step()
        return mean(found.losses)

    loss = run_epochs(step, data, epochs, own, poisson_batches)
    if math.isnan(loss):  # all batches were empty
        with torch.no_grad():
            loss = float(mean(loss_of(network(data.train_images), data.train_labels, reduction="none")))
    return NoisyEpochs(loss=loss, steps=taken)


def _noised(sums: Sequence[Tensor], noise: StepNoise) -> list[Tensor]:
    """Add the noise of one step to the sums of clipped gradients, in place."""
    if noise.noise_multiplier:
        sizes = [each.numel() for each in sums]
        values = gaussian_tensor(sum(sizes), noise.noise_multiplier * noise.clip_norm)
        values = send(values.to(sums[0].dtype), sums[0].device)
        for each, part in zip(sums, torch.split(values, sizes), strict=True):
            each += part.view_as(each)
    return list(sums)


def _plain(network: nn.Module, parameters: Sequence[Tensor], images: Tensor, labels: Tensor) -> Sequence[Tensor]:
    """Return the sums of the gradients of a batch, without clipping and noise."""
    if not len(labels):
        return [torch.zeros_like(parameter) for parameter in parameters]
    loss = loss_of(network(images), labels, reduction="sum")
    return torch.autograd.grad(loss, list(parameters))


def _assign(parameters: Sequence[Tensor], sums: Sequence[Tensor], batch_size: int) -> None:
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / batch_size
