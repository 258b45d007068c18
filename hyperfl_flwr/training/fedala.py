"""FedALA's adaptive local aggregation: local training starts between the client's last model and the received one.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, equations 3 to 5 and algorithm 1. With t the client's last model and x the received one, a parameter p of the last
layers starts from

    p = t + (x - t) W        W <- clip(W - rate dL/dp (x - t), 0, 1)

with one weight in W for each number. At W = 1 this is x, exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.local_sgd import Predict

STEADY, SPREAD = 10, 0.1
"""Weights are steady when the standard deviation of the losses of the last `STEADY` passes is below `SPREAD`."""

MOST_PASSES = 100
"""Largest number of passes over the samples, since losses need not become steady."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Parameters between two models, and their weights.

    Attributes:
        parameters: The network's parameters, which are set in place.
        last: Their values in the client's last model.
        received: Their values in the received model.
        weights: One weight in [0, 1] for each of their numbers, changed in place; 1 is the received value.
    """

    parameters: Sequence[Tensor]
    last: Sequence[Tensor]
    received: Sequence[Tensor]
    weights: Sequence[Tensor]

    @torch.no_grad()
    def apply(self) -> None:
        """Set the parameters to the mixture."""
        for parameter, last, received, weight in self._rows():
            parameter.copy_(torch.lerp(last, received, weight))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Take one step of the weights along the gradients of the parameters, and apply them."""
        for (_, last, received, weight), gradient in zip(self._rows(), gradients, strict=True):
            weight.sub_(rate * gradient * (received - last)).clamp_(0, 1)
        self.apply()

    def _rows(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return list(zip(self.parameters, self.last, self.received, self.weights, strict=True))


def learn_weights(
    predict: Predict, mixture: Mixture, batches: Sequence[tuple[Tensor, Tensor]], rate: float, *, until_steady: bool
) -> int:
    """Learn the weights of a mixture, and leave the network at the mixture.

    Args:
        predict: The network, in evaluation mode; it must depend on the mixture's parameters.
        mixture: The parameters and weights.
        batches: Images [B, C, H, W] and labels [B] of one pass.
        rate: Step size of the weights.
        until_steady: Whether passes are repeated until the loss is steady; otherwise one is made.

    Returns:
        The number of passes.
    """
    mixture.apply()
    losses: list[float] = []
    while len(losses) < (MOST_PASSES if until_steady else 1):
        for images, labels in batches:
            loss = loss_of(predict(images), labels)
            mixture.step(torch.autograd.grad(loss, list(mixture.parameters), materialize_grads=True), rate)
        losses.append(float(loss.detach()))
        if len(losses) > STEADY and np.std(losses[-STEADY:]) < SPREAD:
            break
    return len(losses)
