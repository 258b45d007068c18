"""Estimate a client's label distribution from its descriptor, by the predictions of the model generated from it.

IT-PFL-HN's server gets the descriptor g(D) of a novel client and makes the client's model f itself. A personal
model favours the classes that its client has, for any input. With images x_1 ... x_m of all classes that are not the
client's, the server's estimate of the share of class k in D is

    p_k = 1/m sum_j softmax(f(x_j))_k

The estimate uses no label, no other client's descriptor and no knowledge of D. The attack is this project's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from hyperfl_flwr.metrics.distributions import rank_correlation, total_variation
from hyperfl_flwr.models.target import Target

Shares = NDArray[np.float64]

BATCH = 500
"""Number of images in one forward pass."""


@torch.no_grad()
def expected_shares(target: Target, parameters: Mapping[str, NDArray[Any]], images: Tensor) -> Shares:
    """Return the mean softmax [K] of a model over images [m, ...], m > 0.

    Args:
        target: The network, in evaluation mode; its own values are not used.
        parameters: Parameters of the model, by the network's names.
        images: Images, normalised as for training.
    """
    values = {name: torch.as_tensor(value) for name, value in parameters.items()}
    total = torch.zeros((), dtype=torch.float64)
    for batch in torch.split(images, BATCH):
        logits: Tensor = functional_call(target, values, (batch,))
        total = total + torch.softmax(logits.double(), dim=1).sum(dim=0)
    shares: Shares = (total / len(images)).numpy()
    return shares


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Agreement between estimated and true class shares of n clients, one number per client.

    Attributes:
        total_variation: Total variation distance, in [0, 1].
        rank_correlation: Spearman's rank correlation; NaN if the shares are constant.
    """

    total_variation: tuple[float, ...]
    rank_correlation: tuple[float, ...]


def paired_fit(estimates: Sequence[Shares], truth: Sequence[Shares]) -> Fit:
    """Compare the estimate [K] of each client with its own shares [K]."""
    pairs = list(zip(estimates, truth, strict=True))
    return Fit(
        total_variation=tuple(total_variation(*pair) for pair in pairs),
        rank_correlation=tuple(rank_correlation(*pair) for pair in pairs),
    )


def swapped_fit(estimates: Sequence[Shares], truth: Sequence[Shares]) -> Fit:
    """Compare the estimates of all OTHER clients with each client's shares [K], and take the mean over the others.

    This control measures what all clients' estimates have in common; it knows nothing of the client. It needs at least
    two clients.
    """
    fits = []
    for client, shares in enumerate(truth):
        others = [estimate for number, estimate in enumerate(estimates) if number != client]
        fits.append(paired_fit(others, [shares] * len(others)))
    return Fit(
        total_variation=tuple(float(np.mean(fit.total_variation)) for fit in fits),
        rank_correlation=tuple(float(np.mean(fit.rank_correlation)) for fit in fits),
    )
