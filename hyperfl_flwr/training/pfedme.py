"""Local training of pFedMe.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, algorithm 1. Client i has
two models: w, its copy of the common one, and theta, its personalized one. On each batch, K steps decrease the batch's
loss f(theta) + lambda/2 |theta - w|^2; then w <- w - eta lambda (w - theta), since lambda (w - theta) is the gradient
with respect to w of the minimum over theta (the Moreau envelope). theta starts at w in each round and continues from
batch to batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.local_sgd import (
    Epochs,
    Objective,
    ParameterSet,
    TrainingData,
    add_forces,
    new_optimiser,
    run_epochs,
)


@dataclass(frozen=True, kw_only=True)
class ProximalSteps:
    """Settings of the steps on one batch.

    Attributes:
        learning_rate: Rate of the steps on theta.
        pull: lambda.
        inner_steps: Number K of steps on theta.
        model_learning_rate: Rate eta of w.
    """

    learning_rate: float
    pull: float
    inner_steps: int
    model_learning_rate: float

    def effective_rate(self, epochs: Epochs) -> float:
        """Return the rate of one step of SGD on w that moves it as far as one batch does along a constant gradient."""
        theta = buffer = 0.0
        for _ in range(self.inner_steps):
            buffer = epochs.momentum * buffer + 1 + self.pull * theta
            theta -= self.learning_rate * buffer
        return -self.model_learning_rate * self.pull * theta


def train_pfedme(
    personalized: nn.Module,
    common: list[Tensor],
    data: TrainingData,
    epochs: Epochs,
    steps: ProximalSteps,
    rng: np.random.Generator,
    objective: Objective | None = None,
) -> float:
    """Train theta and w in place.

    Args:
        personalized: The network with the parameters theta; at first those of w.
        common: w, a tensor for each of these parameters, without gradients.
        data: The client's training samples.
        epochs: Length and settings of the training; momentum and weight decay are those of the steps on theta.
        steps: Settings of the steps on a batch.
        rng: Order of the samples and augmentation.
        objective: What the steps on theta minimise besides the pull; by default the cross-entropy of `personalized`.

    Returns:
        Mean loss of the last pass in nats, of each batch at theta before its K steps.
    """
    theta = list(personalized.parameters())
    part = ParameterSet(parameters=theta, learning_rate=steps.learning_rate, pull=steps.pull, anchor=common)
    optimiser = new_optimiser([part], epochs)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for _ in range(steps.inner_steps):
            optimiser.zero_grad()
            if objective is None:
                loss, added = loss_of(personalized(images), labels), None
            else:
                loss, added = objective(images, labels)
            (loss if added is None else loss + added).backward()  # type: ignore[no-untyped-call]
            add_forces(part)
            optimiser.step()
            losses.append(loss.detach())
        with torch.no_grad():
            for w, value in zip(common, theta, strict=True):
                w -= steps.model_learning_rate * steps.pull * (w - value)
        return losses[0]

    return run_epochs(step, data, epochs, rng)
