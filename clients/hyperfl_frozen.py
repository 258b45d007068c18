"""HyperFL's client with one frozen embedding for all: shares theta, keeps the classifier private.

With z constant, HyperFL's round on (H, c) is FedRep's round on theta = z H + c at other rates (`as_fedrep`), so clients
can exchange theta instead of the hypernetwork.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clients.engine.split import SplitClient
from clients.hyperfl import HEALTH, hyperfl_rates
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.models.hypernetwork import frozen_hidden
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.fedrep import FedRepRates
from hyperfl_flwr.training.hyperfl import as_fedrep
from hyperfl_flwr.training.local_sgd import Epochs
from hyperfl_flwr.training.public_training import LocalSteps


def _hidden(config: RunConfig) -> Tensor:
    """Return the constant output z [p] of the hypernetwork's hidden layer."""
    method = config.section(HyperFLConfig)
    return frozen_hidden(method.embedding_dim, method.hidden_width, method.initialisation, config.seed)


def _rates(config: RunConfig) -> FedRepRates:
    return as_fedrep(hyperfl_rates(config), config.weight_decay, float(_hidden(config).square().sum()))


class HyperFLFrozenClient(SplitClient):
    """Trains the classifier, then the extractor theta."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}
    is_generated: ClassVar[bool] = True
    can_join: ClassVar[bool] = True

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local steps that train theta, with the rates at which a hypernetwork's heads would move it."""
        rates, plain = _rates(config), super().local_steps(config)
        decay = plain.weight_decay if rates.weight_decay is None else rates.weight_decay
        return replace(plain, learning_rate=rates.extractor, clip_norm=rates.clip_norm, weight_decay=decay)

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the loss and the health that `HyperFLClient` reports."""
        return (*super().training_metrics(config), *HEALTH)

    def epochs(self) -> Epochs:
        """Return the local epochs of the settings, unconverted: they train the classifier, which no head generates."""
        return super().local_steps(self.context.config)

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private classifier in place; the received extractor is constant."""
        self.train_classifier(hyperfl_rates(self.context.config).classifier, rounds, rng)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train classifier and theta in place; reports `train-loss` and the health that `HyperFLClient` reports."""
        config = self.context.config
        hidden, rates = _hidden(config), _rates(config)
        metrics = self.train_parts(rates, rng)
        theta = torch.cat([parameter.detach().flatten() for parameter in self.model.extractor.parameters()])
        numbers = (float(hidden.square().sum()), float((hidden > 0).sum()), float(theta.norm()))
        return metrics | dict(zip(HEALTH, numbers, strict=True))
