"""HyperFL's client with one frozen embedding for all: shares theta, keeps the classifier.

With z constant, HyperFL's round on (H, c) is FedRep's round on theta = z H + c at other rates (`as_fedrep`), so theta
may travel in the place of the hypernetwork.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from clients.engine.split import SplitClient
from clients.hyperfl import hyperfl_rates
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.models.hypernetwork import frozen_hidden
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.fedrep import train_fedrep
from hyperfl_flwr.training.hyperfl import as_fedrep


class HyperFLFrozenClient(SplitClient):
    """Trains the classifier, then theta."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}
    generated: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the classifier."""
        self.train_classifier(hyperfl_rates(self.setting).classifier, rounds, rng)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local round; reports `train-loss` and the numbers of the hypernetwork that HyperFL's client does."""
        config, method = self.setting.config, self.setting.config.section(HyperFLConfig)
        hidden = frozen_hidden(method.embedding_dim, method.hidden_width, method.initialisation, config.seed)
        epochs, squared_norm = self.epochs(), float(hidden.square().sum())
        rates = as_fedrep(hyperfl_rates(self.setting), epochs.weight_decay, squared_norm)
        extractor, classifier = self.model.extractor, self.model.classifier
        loss = train_fedrep(extractor, classifier, self.setting.data, epochs, rates, rng)
        theta = torch.cat([parameter.detach().flatten() for parameter in extractor.parameters()])
        return {
            "train-loss": loss,
            "hidden-squared-norm": squared_norm,
            "hidden-active-units": float((hidden > 0).sum()),
            "theta-norm": float(theta.norm()),
        }
