"""The embedding of a client that joins a trained federation: it is trained under a constant hypernetwork.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021: a new client under
a fixed hypernetwork. The client trains theta = h(v; varphi) and returns its change delta = theta - theta'. The step is
that of `hyperfl_flwr.models.server_hypernetwork`, for v alone:

    dL/dv = (dtheta/dv)^T delta        (equation 2)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork, ServerRates


class NewEmbedding:
    """Generates the network of a client that joins, and trains the client's embedding.

    Args:
        hypernetwork: The trained hypernetwork; it is not changed.
        start: Initial embedding [d].
        rates: Settings of the step; those of embeddings apply. `combine` has no effect on a single client.

    Attributes:
        embedding: The embedding [d].
    """

    def __init__(self, hypernetwork: DeepHypernetwork, start: Tensor, rates: ServerRates) -> None:
        self._hypernetwork, self._clip_norm = hypernetwork, rates.clip_norm
        self.embedding = torch.nn.Parameter(start.detach().clone())
        embedding: dict[str, Any] = {"params": [self.embedding], **rates.of_embeddings()}
        self._optimiser = SGD(
            [embedding], lr=rates.learning_rate, momentum=rates.momentum, weight_decay=rates.weight_decay
        )

    @torch.no_grad()
    def generate(self) -> dict[str, Tensor]:
        """Return the client's network: parameters by name."""
        theta = self._hypernetwork(self.embedding)
        return {name: value.clone() for name, value in self._hypernetwork.split(theta).items()}

    def update(self, change: Mapping[str, Tensor]) -> None:
        """Take one step along the vector-Jacobian product of the client's change.

        Args:
            change: theta before training minus theta after it, by parameter name.
        """
        delta = torch.cat([change[name].flatten() for name in self._hypernetwork.shapes])
        # Not `backward`, which would also write gradients of the hypernetwork.
        (self.embedding.grad,) = torch.autograd.grad(self._hypernetwork(self.embedding), self.embedding, delta)
        if self._clip_norm > 0:
            torch.nn.utils.clip_grad_norm_([self.embedding], self._clip_norm)
        self._optimiser.step()
