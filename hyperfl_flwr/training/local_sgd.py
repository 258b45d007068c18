"""Local epochs of stochastic gradient descent."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.weighted_order import weighted_order

Predict = Callable[[Tensor], Tensor]
"""Maps images [B, C, H, W] to logits [B, K]."""

Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps a batch's images [B, C, H, W] and labels [B] to the mean loss that is reported, and to a term that is minimised
in addition, or None."""

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on images [B, C, H, W] and labels [B]; returns their mean loss before it."""

Pass = Callable[["TrainingData", int, np.random.Generator], Iterator[tuple[Tensor, Tensor]]]
"""Yields the batches of one pass, as `batches` does."""


class RandomChange(Protocol):
    """A random change of training samples, for example `hyperfl_flwr.data.augmentation.Augmentation`."""

    def draw(self, sizes: Sequence[int], rng: np.random.Generator) -> Tensor:
        """Return random numbers for the samples of some batches of these sizes, [n, ...], on the CPU."""

    def __call__(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Return changed copies of images [B, C, H, W], given their random numbers [B, ...] on the same device."""


class TrainingData(Protocol):
    """The training samples of one client."""

    @property
    def train_images(self) -> Tensor:
        """Images [n, C, H, W], normalised."""

    @property
    def train_labels(self) -> Tensor:
        """Labels [n], int64."""

    @property
    def augmentation(self) -> RandomChange | None:
        """The random change of training images; None if training uses them unchanged."""

    @property
    def train_weights(self) -> NDArray[np.float64] | None:
        """Weights [n], at least 0 and not all 0: how often a pass has each sample, see `weighted_order`.

        None if a pass has each sample once.
        """


@dataclass(frozen=True, kw_only=True)
class ParameterSet:
    """Parameters that are stepped with one rate and clipped together.

    Attributes:
        parameters: Leaf tensors that require a gradient.
        learning_rate: Step size.
        clip_norm: Largest norm of their joint gradient; 0 does not clip.
        force: Constant tensors, one per parameter, that are added to the gradients after clipping; none if empty.
        pull: If positive, `pull` times (parameter - anchor) is added to the gradients after clipping, too.
        anchor: Constant tensors, one per parameter, towards which `pull` moves the parameters; empty if `pull` is 0.
        weight_decay: L2 coefficient; None for that of `Epochs`.
    """

    parameters: Sequence[Tensor]
    learning_rate: float
    clip_norm: float = 0.0
    force: Sequence[Tensor] = ()
    pull: float = 0.0
    anchor: Sequence[Tensor] = ()
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Length and settings of local SGD.

    Attributes:
        epochs: Number of passes.
        batch_size: Samples per step; the last batch of a pass may be shorter.
        momentum: Momentum coefficient; the buffers start empty.
        weight_decay: L2 coefficient, added to the gradient after clipping.
        steps: Number of steps, over as many passes as necessary; replaces `epochs` if positive.
    """

    epochs: int
    batch_size: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    steps: int = 0

    def num_steps(self, num_examples: int) -> int:
        """Return the number of steps that a client with `num_examples` samples takes."""
        return self.steps or self.epochs * math.ceil(num_examples / self.batch_size)

    def num_used(self, num_examples: int) -> int:
        """Return how many of a client's `num_examples` samples are in a batch at least once."""
        return min(num_examples, self.steps * self.batch_size) if self.steps else num_examples

    def over(self, rounds: int) -> Self:
        """Return the training of a number of rounds in a row."""
        return replace(self, epochs=rounds * self.epochs, steps=rounds * self.steps)

    def reach(self, num_examples: int) -> float:
        """Return a(K, beta): how far a constant gradient moves a parameter in K steps, in units of rate * gradient.

        That is K without momentum, and (K - beta (1 - beta^K) / (1 - beta)) / (1 - beta) with momentum beta.
        """
        number, beta = self.num_steps(num_examples), self.momentum
        return (number - beta * (1 - beta**number) / (1 - beta)) / (1 - beta)


def pass_order(data: TrainingData, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the positions [n] of the samples of one pass, in random order: each once, or `weighted_order`."""
    weights = data.train_weights
    return rng.permutation(len(data.train_labels)) if weights is None else weighted_order(weights, rng)


def drawn_pass(
    data: TrainingData, batch_size: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], Tensor | None]:
    """Draw one pass over the data: the positions [n] of its samples, and the random numbers of their augmentation.

    With weights, a pass has as many samples, some of them several times, others not at all.

    Args:
        data: The client's training samples.
        batch_size: Samples per step; the last batch may be shorter.
        rng: Source of both.

    Returns:
        The positions, and the random numbers [n, ...] in the same order; None without augmentation.
    """
    order, change = pass_order(data, rng), data.augmentation
    if change is None:
        return order, None
    return order, change.draw([min(batch_size, len(order) - first) for first in range(0, len(order), batch_size)], rng)


def batches(data: TrainingData, batch_size: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one pass over the data in random order as (images, labels), see `drawn_pass`."""
    images, labels, change = data.train_images, data.train_labels, data.augmentation
    order, drawn = drawn_pass(data, batch_size, rng)
    indices = torch.split(send(torch.from_numpy(order), labels.device), batch_size)
    if change is None or drawn is None:
        yield from ((images[index], labels[index]) for index in indices)
        return
    for index, some in zip(indices, torch.split(send(drawn, labels.device), batch_size), strict=True):
        yield change(images[index], some), labels[index]


def train_epochs(
    predict: Predict,
    sets: Sequence[ParameterSet],
    data: TrainingData,
    epochs: Epochs,
    rng: np.random.Generator,
    objective: Objective | None = None,
) -> float:
    """Minimise the mean cross-entropy, or another objective, by SGD, changing the parameters in place.

    A step takes the gradient, clips it, adds force and pull, then weight decay, then momentum.

    Args:
        predict: The classifier; it must depend on the parameters of `sets`.
        sets: The parameters to train, see `ParameterSet`.
        data: The client's training samples.
        epochs: Length and settings of the training.
        rng: Order of the samples and augmentation.
        objective: What each step minimises; by default the cross-entropy of `predict`.

    Returns:
        Mean training loss of the last pass (with `epochs.steps` of all steps), in nats, each batch before its step; NaN
        without a pass.
    """
    optimiser = new_optimiser(sets, epochs)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimiser.zero_grad()
        if objective is None:
            loss, added = loss_of(predict(images), labels), None
        else:
            loss, added = objective(images, labels)
        whole = loss if added is None else loss + added
        whole.backward()  # type: ignore[no-untyped-call]
        for part in sets:
            if part.clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(part.parameters, part.clip_norm)
            add_forces(part)
        optimiser.step()
        return loss.detach()

    return run_epochs(step, data, epochs, rng)


def new_optimiser(sets: Sequence[ParameterSet], epochs: Epochs) -> SGD:
    """Return the optimiser of some parameters, with empty momentum buffers."""
    groups = [
        {
            "params": list(part.parameters),
            "lr": part.learning_rate,
            "weight_decay": epochs.weight_decay if part.weight_decay is None else part.weight_decay,
        }
        for part in sets
    ]
    return SGD(groups, momentum=epochs.momentum)


def add_forces(part: ParameterSet) -> None:
    """Add force and pull to the gradients of a set, in place."""
    for number, parameter in enumerate(part.parameters):
        if parameter.grad is not None and part.force:
            parameter.grad += part.force[number]
        if parameter.grad is not None and part.pull > 0:
            parameter.grad.add_(parameter.detach() - part.anchor[number], alpha=part.pull)


def run_epochs(
    step: Step, data: TrainingData, epochs: Epochs, rng: np.random.Generator, one_pass: Pass = batches
) -> float:
    """Take a step for each batch of all passes.

    Args:
        step: Trains on (images, labels) and returns the batch's mean loss before it.
        data: The client's training samples.
        epochs: Length of the training.
        rng: Order of the samples and augmentation.
        one_pass: Yields the batches of a pass.

    Returns:
        Mean training loss of the last pass (with `epochs.steps` of all steps), in nats; NaN without a sample.
    """
    mean_loss = float("nan")
    for some in all_passes(data, epochs, rng, one_pass):
        losses = MeanLoss()
        for images, labels in some:
            losses.add(step(images, labels), len(labels))
        mean_loss = losses.value
    return mean_loss


def all_passes(
    data: TrainingData, epochs: Epochs, rng: np.random.Generator, one_pass: Pass = batches
) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
    """Yield the batches of each pass, for the arguments of `run_epochs`; with `epochs.steps` those of all steps."""
    if epochs.steps > 0:
        passes = itertools.chain.from_iterable(one_pass(data, epochs.batch_size, rng) for _ in itertools.count())
        yield itertools.islice(passes, epochs.steps)
        return
    for _ in range(epochs.epochs):
        yield one_pass(data, epochs.batch_size, rng)


class MeanLoss:
    """Mean of the batches' losses, weighted by their numbers of samples."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._num_samples = 0

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Add the mean loss of a batch."""
        self._total = self._total + (loss * num_samples).double()
        self._num_samples += num_samples

    @property
    def value(self) -> float:
        """The mean loss, in nats; NaN without a sample."""
        return float(self._total) / self._num_samples if self._num_samples else float("nan")
