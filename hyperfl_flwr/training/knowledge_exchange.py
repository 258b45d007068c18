"""Knowledge exchange by logits on public samples, as in FedAKD.

Gad and Fadlullah: "Federated Learning via Augmented Knowledge Distillation for Heterogenous Deep Human Activity
Recognition Systems", Sensors 2023. Clients compute logits on a mixture of public samples, and later minimise the mean
distance |logits - target| from the weighted mean of all clients' logits.

The gradient of this distance has the size of its sign, however small the distance is: rounding alone would give a full
step. So logits are computed and digested in the same batches, in the same order, and in evaluation mode: a client that
is alone gets its own logits back to the bit, its gradient is zero, and it stays as it is.

A client with the weight w sends the vector [w (logits + 10), w]. The server divides the mean of these over all clients
by its last number, and sends the result. A vector with a last number of 0 has no knowledge.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, new_optimiser

OFFSET = 10.0
"""Added to logits, so that what is sent is not small: limits on changes and ranges of sums are measured against it."""

LEAST_WEIGHT = 1e-3
"""Least mean weight with which there is knowledge.

A smaller one may be the rounding of a secure sum, or another node's negative weight; what is divided by it is then
large and means nothing. As a mean accuracy it is below that of any guess.
"""


def packed(logits: Tensor, weight: float) -> Tensor:
    """Return the vector [n K + 1], float64, for logits [n, K] and a weight of at least 0."""
    last = torch.tensor([weight], dtype=torch.float64, device=logits.device)
    return torch.cat([(logits.double().flatten() + OFFSET) * weight, last])


def nothing(size: int) -> Tensor:
    """Return the vector without knowledge for `size` logits."""
    return torch.cat([torch.full([size], OFFSET, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])


def unpacked(mean: Tensor, count: int) -> Tensor | None:
    """Return the weighted mean logits [count, K], float32, of a mean of vectors; None without knowledge."""
    if not mean[-1] > 0:
        return None
    return (mean[:-1] / mean[-1] - OFFSET).float().view(count, -1)


def logits_on(network: nn.Module, samples: Tensor, batch_size: int) -> Tensor:
    """Return a network's logits [n, K] on samples [n, ...], in evaluation mode, without gradients."""
    network.eval()
    with torch.no_grad():
        return torch.cat([network(part) for part in torch.split(samples, batch_size)])


def distance(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean of |logits - target| over all elements; its gradient is 0 where both are equal."""
    return (logits - target).abs().mean()


def digest(network: nn.Module, samples: Tensor, target: Tensor, epochs: Epochs, learning_rate: float) -> None:
    """Move a network's logits towards a target by plain SGD, in place; in evaluation mode, in the samples' order.

    Args:
        network: The network.
        samples: Public samples [n, ...].
        target: The target [n, K].
        epochs: Number of passes, and size of a batch.
        learning_rate: Step size.
    """
    network.eval()
    part = ParameterSet(parameters=list(network.parameters()), learning_rate=learning_rate)
    optimiser = new_optimiser([part], epochs)
    for images, goal in _passes(samples, target, epochs):
        optimiser.zero_grad()
        distance(network(images), goal).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _passes(samples: Tensor, target: Tensor, epochs: Epochs) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(epochs.epochs):
        yield from zip(torch.split(samples, epochs.batch_size), torch.split(target, epochs.batch_size), strict=True)
