"""Robust reductions of the nodes' parameters: a minority of malicious nodes cannot move the result at will.

Each of n nodes has sent parameters x_i, the mean over its clients; s is what they all received, and f is the number of
nodes that may be malicious. Every rule gives a point between the x_i (and s), so that variances stay positive:

- `median` and `trimmed-mean`, for each parameter by itself: Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust
  Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, definitions 1 and 2. Here f values are cut off at
  either end; the median of an even number is the mean of the middle two, as the trimmed mean with f = (n - 1) // 2.
- `krum` and `multi-krum`: Blanchard, El Mhamdi, Guerraoui, Stainer: "Machine Learning with Adversaries: Byzantine
  Tolerant Gradient Descent", NeurIPS 2017. The score of a node is the sum of its squared distances from its n - f - 2
  nearest nodes. Krum takes the node with the least score, Multi-Krum the mean of the n - f nodes with the least ones;
  of equal nodes the first one counts.
- `geometric-median`: the point v with the least sum of |v - x_i|, by the smoothed Weiszfeld algorithm: Pillutla,
  Kakade, Harchaoui: "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing 70, 2022,
  algorithm 2, with equal weights. The paper takes few iterations, since each is a sum over all clients; here the server
  has all x_i, and goes on until the weights stay.
- `norm-bound`: the mean of s + min(1, C / |x_i - s|) (x_i - s): Sun, Kairouz, Suresh, McMahan: "Can You Really Backdoor
  Federated Learning?", 2019.

Distances and norms are over all arrays together. All arithmetic is in float64, rounded once to the arrays' types.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Matrix = NDArray[np.float64]

SMOOTHING = 1e-6
"""Least distance in a weight of the Weiszfeld algorithm, the paper's nu."""

MOST_ITERATIONS, STEADY = 1000, 1e-9
"""Largest number of Weiszfeld iterations, and the relative change of all weights at which they end."""

CLOSE = 1e-6
"""Squared distance, relative to the squared norms, below which it is computed from the difference itself."""

BLOCK = 1 << 18
"""Number of elements of all nodes together that are processed at a time."""


@dataclass(frozen=True, kw_only=True)
class RobustMean:
    """Result of a robust reduction.

    Attributes:
        arrays: The reduced arrays, with the names, shapes and types of those that were sent.
        shares: How much each node counts [n], 1 for an equal share: 0 of one that is left out, min(1, C / norm) of one
            with a bounded norm. None for a rule that decides about each parameter by itself.
    """

    arrays: dict[str, NDArray[Any]]
    shares: Matrix | None = None


def robust_mean(
    rule: str, sent: Arrays, nodes: Sequence[Arrays], byzantine: int, norm_bound: float | None = None
) -> RobustMean:
    """Reduce the nodes' arrays by a rule.

    Args:
        rule: `median`, `trimmed-mean`, `krum`, `multi-krum`, `geometric-median` or `norm-bound`.
        sent: The arrays s that all nodes received.
        nodes: Each node's arrays x_i, finite, with the names, shapes and types of `sent`; n of them. The result
            does not depend on their order, but for nodes with equal scores.
        byzantine: Number f of nodes that may be malicious, from 0.
        norm_bound: Largest norm C of a change, for `norm-bound`; None for the median of the norms.

    Raises:
        ValueError: If the rule is unknown, or there are too few nodes for f.
    """
    least = 2 * byzantine + 3 if rule in ("krum", "multi-krum") else 2 * byzantine + 1 if norm_bound is None else 1
    if len(nodes) < least:
        raise ValueError(f"{rule} with {byzantine} malicious nodes needs {least} nodes at least, got {len(nodes)}")
    if rule in ("median", "trimmed-mean"):
        return RobustMean(arrays=trimmed_mean(nodes, byzantine if rule == "trimmed-mean" else (len(nodes) - 1) // 2))
    products = inner_products(sent, nodes)
    kept = 0.0
    if rule == "norm-bound":
        weights = _bounded(np.sqrt(np.diag(products)), norm_bound)
        kept = float(np.sum(1 - weights))
    elif rule == "geometric-median":
        weights = weiszfeld_weights(products)
    elif rule in ("krum", "multi-krum"):
        chosen = nearest_nodes(squared_distances(products, sent, nodes), byzantine)
        weights = np.zeros(len(nodes))
        weights[chosen[: 1 if rule == "krum" else len(nodes) - byzantine]] = 1
    else:
        raise ValueError(f"unknown rule {rule!r}")
    shares = weights * (len(nodes) / (weights.sum() + kept))
    return RobustMean(arrays=_weighted(sent, nodes, weights, kept), shares=shares)


def trimmed_mean(nodes: Sequence[Arrays], cut: int) -> dict[str, NDArray[Any]]:
    """Return, for each element, the mean over the n nodes without the `cut` largest and the `cut` smallest values.

    Args:
        nodes: Each node's arrays.
        cut: Number of values that are cut off at either end, below n / 2.
    """
    found = {}
    for key, first in nodes[0].items():
        mean = np.empty(first.size, first.dtype)
        for part, values in _blocks(key, nodes):
            # Rows of the nodes' values lie in memory one after another: numpy sorts them with vector instructions, more
            # than twice as fast as it selects the middle ones.
            rows = np.ascontiguousarray(values.T)
            rows.sort(axis=1)
            mean[part] = rows[:, cut : len(nodes) - cut].mean(axis=1, dtype=np.float64)
        found[key] = mean.reshape(first.shape)
    return found


def inner_products(sent: Arrays, nodes: Sequence[Arrays]) -> Matrix:
    """Return the inner products [n, n] of the nodes' changes x_i - s."""
    found = np.zeros((len(nodes), len(nodes)))
    for key, received in sent.items():
        for part, values in _blocks(key, nodes):
            changes = np.subtract(values, received.reshape(-1)[part], dtype=np.float64)
            found += changes @ changes.T
    return found


def squared_distances(products: Matrix, sent: Arrays, nodes: Sequence[Arrays]) -> Matrix:
    """Return the squared distances [n, n] of the nodes, from the inner products of their changes.

    Those of nodes that are close to each other, compared with their changes, are computed from the differences: there,
    |a|^2 + |b|^2 - 2 ab would leave the rounding of the three terms.
    """
    squares = np.diag(products)
    sums = squares[:, None] + squares[None, :]
    found = np.maximum(sums - 2 * products, 0)
    np.fill_diagonal(found, 0)
    for i, j in np.argwhere(np.triu(found <= CLOSE * sums, 1)).tolist():
        found[i, j] = found[j, i] = _squared_distance(sent, nodes[i], nodes[j])
    return found


def nearest_nodes(distances: Matrix, byzantine: int) -> NDArray[np.int64]:
    """Return the nodes in the order of their scores, the least first, and equal ones in their own order.

    Args:
        distances: Squared distances [n, n].
        byzantine: Number f of nodes that may be malicious; n >= 2 f + 3.
    """
    number = len(distances)
    others = distances[~np.eye(number, dtype=bool)].reshape(number, number - 1)
    scores = np.sort(others, axis=1)[:, : number - byzantine - 2].sum(axis=1)
    return np.argsort(scores, kind="stable")


def weiszfeld_weights(products: Matrix) -> Matrix:
    """Return the weights [n] of the nodes in their geometric median; their sum is 1.

    All iterates are weighted means of the nodes, so the inner products suffice: |v - x_k|^2 = c G c - 2 (G c)_k + G_kk
    for v = sum_i c_i x_i. It begins at the mean.

    Args:
        products: Inner products G [n, n] of the nodes' changes.
    """
    weights = np.full(len(products), 1 / len(products))
    for _ in range(MOST_ITERATIONS):
        along = products @ weights
        squares = np.maximum(weights @ along - 2 * along + np.diag(products), 0)
        inverse = 1 / np.maximum(np.sqrt(squares), SMOOTHING)
        before, weights = weights, inverse / inverse.sum()
        if np.all(np.abs(weights - before) <= STEADY * before):
            break
    return weights


def _bounded(norms: Matrix, norm_bound: float | None) -> Matrix:
    """Return the factors [n] that shorten changes of some norms [n] to a bound; None for the median of the norms."""
    bound = float(np.median(norms)) if norm_bound is None else norm_bound
    return np.divide(bound, norms, out=np.ones_like(norms), where=norms > bound)


def _weighted(sent: Arrays, nodes: Sequence[Arrays], weights: Matrix, kept: float) -> dict[str, NDArray[Any]]:
    """Return the mean of the nodes' arrays with some weights, and of what was sent with the weight `kept`.

    Arrays with the weight 0 are not read: of a single node, the result is its arrays bit by bit.
    """
    found, total = {}, float(weights.sum()) + kept
    counted = [(float(weight), node) for weight, node in zip([kept, *weights], [sent, *nodes], strict=True) if weight]
    for key, received in sent.items():
        mean = np.zeros(received.size)
        for weight, node in counted:
            for first in range(0, received.size, BLOCK):
                part = slice(first, first + BLOCK)
                mean[part] += np.multiply(node[key].reshape(-1)[part], weight, dtype=np.float64)
        mean /= total
        found[key] = mean.astype(received.dtype).reshape(received.shape)
    return found


def _squared_distance(sent: Arrays, one: Arrays, other: Arrays) -> float:
    square = 0.0
    for key in sent:
        for _, (a, b) in _blocks(key, [one, other]):
            difference = np.subtract(a, b, dtype=np.float64)
            square += float(np.dot(difference, difference))
    return square


def _blocks(key: str, nodes: Sequence[Arrays]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield an array of all nodes in parts, of `BLOCK` elements together: a slice of the flat array, and [n, width]."""
    flat = [node[key].reshape(-1) for node in nodes]
    width = max(1, BLOCK // len(nodes))
    for first in range(0, flat[0].size, width):
        part = slice(first, first + width)
        yield part, np.stack([values[part] for values in flat])
