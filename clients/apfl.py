"""APFL's client: FedAvg's local training, and in the same steps that of a private model in a mixture with the shared.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", arXiv 2003.13461, 2020, algorithm 1. With w the
shared model and v the private one, on a batch

    v <- v - rate alpha grad f(u)      u = alpha v + (1 - alpha) w      w <- w - rate grad f(w)

where u has w before its step. Once a round, on its first batch: alpha <- clip(alpha - rate <v - w, grad f(u)>, 0, 1).
"""

import copy
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.engine.personal import PersonalClient
from hyperfl_flwr.methods.apfl import APFLConfig
from hyperfl_flwr.models.layers.batchnorm import preserve_running_statistics
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.models.vector import Vector
from hyperfl_flwr.training.local_sgd import Objective, ParameterSet, Predict, batches


class APFLClient(PersonalClient):
    """Mixes parameters; running statistics are the mixture's own."""

    private: ClassVar[tuple[str, ...]] = ("personal", "share")

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model`, `personal`, and `share`, which has alpha."""
        self.share = Vector(1)
        return {**super().build_groups(), "share": self.share}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, and the alpha of the settings."""
        alpha = torch.tensor([self.context.config.section(APFLConfig).alpha], dtype=torch.float32)
        return super().initial_private() | {"share": {"theta": alpha}}

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters of the shared and of the private model."""
        return [*super().parameter_sets(), self.personal_set(())]

    def objective(self) -> Objective:
        """Return the shared model's loss, which is reported, and the mixture's, which moves the private model only."""

        def losses(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            shared = loss_of(self.model(images), labels)
            return shared, loss_of(self._mixture(images), labels)

        return losses

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Adapt alpha, then train both models in place; reports the shared model's `train-loss`."""
        config = self.context.config
        self.seed_personal_dropout()
        if config.section(APFLConfig).adaptive:
            self._adapt(*next(batches(self.context.data, config.batch_size, copy.deepcopy(rng))))
        return super().train(rng)

    def predictor(self) -> Predict:
        """Return the mixture."""
        return self._mixture

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the mixture, with its own running statistics."""
        mixed = {name: value.detach() for name, value in self._mixed().items()}
        return {name: mixed.get(name, value) for name, value in self.personal.state_dict().items()}

    def personalized_model(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return None: the shared model after the client's local training is not stored."""
        return None

    def _mixed(self) -> dict[str, Tensor]:
        """Return alpha v + (1 - alpha) w by name; gradients reach v alone."""
        shared, alpha = dict(self.model.named_parameters()), self.share.theta
        return {
            name: torch.lerp(shared[name].detach(), v, alpha.to(v.dtype))
            for name, v in self.personal.named_parameters()
        }

    def _mixture(self, images: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.personal, self._mixed(), (images,))
        return logits

    def _adapt(self, images: Tensor, labels: Tensor) -> None:
        """Take one step of alpha on a batch."""
        mixed = {name: value.detach().requires_grad_() for name, value in self._mixed().items()}
        with preserve_running_statistics(self.personal):
            loss = loss_of(functional_call(self.personal, mixed, (images,)), labels)
        gradients = torch.autograd.grad(loss, list(mixed.values()), materialize_grads=True)
        pairs = zip(self.personal.parameters(), self.model.parameters(), gradients, strict=True)
        slope = sum(((v - w).detach() * gradient).sum().double() for v, w, gradient in pairs)
        self.share.theta.sub_(self.steps.learning_rate * slope).clamp_(0, 1)
