"""Per-FedAvg's client: trains the model for the loss that it has after one gradient step on the client's data.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, algorithm 1. A local step divides its batch: B1 is the first half, B2 the rest. With
u = w - alpha grad f(w; B1) it is w <- w - beta (1 - alpha H(w; B1)) grad f(u; B2), where `fo` leaves out the Hessian H.
The paper's HF approximates the product with H by finite differences on a third batch; here it is exact. The server is
FedAvg's.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from clients.engine.cohort_training import CohortTraining
from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.device import send
from hyperfl_flwr.methods.per_fedavg import PerFedAvgConfig
from hyperfl_flwr.models.layers.batchnorm import has_statistics, preserve_running_statistics
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.local_sgd import Objective, Predict
from hyperfl_flwr.training.one_step import stepped


class PerFedAvgClient(FedAvgClient):
    """Uploads the start w; uses the model after one step from the received w on all of its training samples.

    Attributes:
        adapted: The model after that step; None before local training.
    """

    has_noisy_steps: ClassVar[bool] = False
    adapted: Target | None = None

    @classmethod
    def together(cls, config: RunConfig, received: SharedArrays, device: torch.device) -> CohortTraining | None:
        """Return what trains clients together, see `BaseClient.together`; None for gradients of gradients."""
        if config.section(PerFedAvgConfig).mode == "hf":
            return None
        return super().together(config, received, device)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Adapt a copy of the received model, and train the model in place; reports `train-loss`, that on B2 at u."""
        self.adapted = self._adapted()
        return super().train(rng)

    def objective(self) -> Objective:
        """Return the loss on B2 after a step on B1; in a batch of one sample, both are that sample.

        With BatchNorm, which may be unable to normalise one sample, the batch takes the place of a half of one sample.
        """
        settings, model = self.context.config.section(PerFedAvgConfig), self.model
        parameters, smallest = dict(model.named_parameters()), 2 if has_statistics(model) else 1

        def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, None]:
            half = len(labels) // 2
            first, second = slice(0, half), slice(half, None)
            if half < smallest:
                first = slice(None)
            if len(labels) - half < smallest:
                second = slice(None)

            def inner(values: Mapping[str, Tensor]) -> Tensor:
                with preserve_running_statistics(model):  # they are those of B2 at u alone
                    return _loss(model, values, images[first], labels[first])

            adapted = stepped(parameters, inner, settings.alpha, first_order=settings.mode == "fo")
            return _loss(model, adapted, images[second], labels[second]), None

        return objective

    def _adapted(self) -> Target:
        """Return the received model after one step on the mean loss of all training samples, in evaluation mode.

        The mean is weighted if the samples are.
        """
        data, size, adapted = self.context.data, self.context.config.batch_size, self.copied_model().eval()
        alpha = self.context.config.section(PerFedAvgConfig).alpha
        parameters = list(adapted.requires_grad_(True).parameters())
        gradient = [torch.zeros_like(parameter) for parameter in parameters]
        number = len(data.train_labels)
        weights = np.ones(number) if data.train_weights is None else data.train_weights
        shares = send(torch.from_numpy(weights / weights.sum()).to(data.train_images.dtype), data.train_labels.device)
        parts = (torch.split(each, size) for each in (data.train_images, data.train_labels, shares))
        for images, labels, share in zip(*parts, strict=True) if alpha and number else ():
            loss = share @ loss_of(adapted(images), labels, reduction="none")
            of_batch = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for total, part in zip(gradient, of_batch, strict=True):
                total += part
        with torch.no_grad():
            for parameter, direction in zip(parameters, gradient, strict=True):
                parameter.sub_(direction, alpha=alpha)
        return adapted

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace both models by the received one, see `BaseClient.undo`."""
        self.adapted = None
        super().undo(received, version)

    def predictor(self) -> Predict:
        """Return the adapted model; before local training, the received one."""
        return self.adapted or self.model

    def received_predictor(self) -> Predict:
        """Return the received model."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the adapted model; before local training, the received one."""
        return (self.adapted or self.model).state_dict()

    def received_state(self) -> Mapping[str, Tensor]:
        """Return the received model."""
        return self.model.state_dict()


def _loss(model: Target, values: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return loss_of(functional_call(model, dict(values), (images,)), labels)
