"""HyperFL's client with one frozen embedding for all: shares theta, keeps the classifier.

With z constant, HyperFL's round on (H, c) is FedRep's round on theta = z H + c at other rates (`as_fedrep`), so theta
may travel in the place of the hypernetwork.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.hyperfl import hyperfl_rates
from clients.split import SplitClient
from hyperfl_flwr.messages import Reduction
from hyperfl_flwr.models.hypernetwork import common_embedding, initial_hidden
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.fedrep import train_fedrep
from hyperfl_flwr.training.hyperfl import as_fedrep


class HyperFLFrozenClient(SplitClient):
    """Trains the classifier, then theta."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local round; reports `train-loss` and the numbers of the hypernetwork that HyperFL's client does."""
        hidden = self._hidden()
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

    def _hidden(self) -> Tensor:
        """Return the hidden activation z [p] of the common embedding, which never changes."""
        seed, method = self.setting.config.seed, self.setting.config.hyperfl
        first_layer = initial_hidden(
            nn.Linear(method.embedding_dim, method.hidden_width, device="meta"),
            method.initialisation,
            torch_generator(seed, "hypernetwork"),
        )
        v = common_embedding(method.embedding_dim, method.initialisation, seed)
        return torch.relu(first_layer["weight"] @ v + first_layer["bias"])
