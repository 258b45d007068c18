"""Allocate samples to clients from class proportions: sizes without reuse, rounding to whole numbers, and dealing.

Sizes. ``auto`` is the largest size per client for which no sample is needed twice, at most the size that the data set
recommends. Class k limits it to (samples of class k) / (sum over the clients of their proportion of k). The size is
lowered from the smallest of these limits until the whole numbers fit, too (a few random roundings are tried for each
size). If not even one sample per client fits, the size is 1 and samples are reused. A size given as a number is
kept, and samples of a class are reused if there are too few.

Reuse is even: within a class no sample is used twice before all are used once, and no client holds a sample twice
unless it needs more samples than there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray

FloatArray = npt.NDArray[np.float64]
_DECIMALS = 9
_ROUNDINGS = 10


def class_counts(indices: Sequence[IntArray], labels: IntArray, num_classes: int) -> IntArray:
    """Count the samples of each class for every client.

    Args:
        indices: Positions in `labels` of each client's samples.
        labels: Labels of the pool [n], in 0..K-1.
        num_classes: Number of classes K.

    Returns:
        [N, K] numbers of samples.
    """
    counts = [np.bincount(labels[chosen], minlength=num_classes) for chosen in indices]
    return np.stack(counts).astype(np.int64)


def available_proportions(proportions: FloatArray, labels: IntArray) -> FloatArray:
    """Set the proportions of classes without samples to 0 and rescale the others.

    Args:
        proportions: Class proportions of each client [N, K], non-negative.
        labels: Labels of the pool [n], in 0..K-1.

    Returns:
        [N, K], with rows that sum to 1.

    Raises:
        DataError: If no class of a client has samples.
    """
    present = np.bincount(labels, minlength=proportions.shape[1]) > 0
    kept = proportions * present
    total = kept.sum(axis=1, keepdims=True)
    if (total <= 0).any():
        client = int(np.flatnonzero(total[:, 0] <= 0)[0])
        classes = np.flatnonzero(proportions[client] > 0).tolist()
        raise DataError(
            f"every client needs samples of its classes, but there are none of the classes {classes} of client "
            f"{client}; add such samples or choose another partition"
        )
    return np.asarray(kept / total)


def round_fairly(expected: FloatArray, rng: np.random.Generator) -> IntArray:
    """Round every row to whole numbers with the same sum, without bias.

    Systematic sampling: the fractions of a row are laid end to end, in a random order of the classes, and points are
    placed on them at distance 1. The offsets of the points are spread evenly over the rows, in random order. The
    expected value of every count is exactly `expected`, and over equal rows the sum of a class is the expected sum
    rounded up or down.

    Args:
        expected: Expected numbers [N, K], non-negative, with rows that sum to whole numbers.
        rng: Source of the order and the offsets.

    Returns:
        [N, K], each number of `expected` rounded up or down.
    """
    num_rows, num_classes = expected.shape
    exact = np.round(expected, _DECIMALS)  # or a number such as 2.9999999999 would lose a whole sample
    order = rng.permutation(num_classes)
    offset = (rng.permutation(num_rows) + rng.random())[:, None] / num_rows
    whole = np.floor(exact)
    ends = np.cumsum((exact - whole)[:, order], axis=1)
    ends[:, -1] = np.rint(ends[:, -1])  # the fractions of a row sum to a whole number, but for rounding errors
    points = np.floor(ends + offset)
    counts = whole.astype(np.int64)
    counts[:, order] += np.diff(points, axis=1, prepend=0).astype(np.int64)
    return counts


def largest_remainder(proportions: FloatArray, sizes: IntArray, rng: np.random.Generator) -> IntArray:
    """Round `sizes * proportions` to whole numbers that add up to the sizes (Hamilton's method).

    Args:
        proportions: Class proportions [N, K], with rows that sum to 1.
        sizes: Number of samples of each client [N].
        rng: Source of the choice between equal remainders.

    Returns:
        [N, K], with rows that sum to `sizes`.
    """
    exact = np.round(proportions * sizes[:, None], _DECIMALS)
    counts = np.floor(exact).astype(np.int64)
    remainders = np.round(exact - counts, _DECIMALS)
    # The last key of lexsort is the primary one: by descending remainder, ties in random order.
    order = np.lexsort((rng.random(exact.shape), -remainders), axis=1)
    rank = np.argsort(order, axis=1)
    extra = rank < (sizes - counts.sum(axis=1))[:, None]
    return np.asarray(counts + extra, dtype=np.int64)


def equal_sizes(
    proportions: FloatArray,
    labels: IntArray,
    samples: int | None,
    cap: int | None,
    rounding: Callable[[FloatArray], IntArray],
) -> IntArray:
    """Return the number of samples of each class for each client, with the same total for all clients.

    Args:
        proportions: Class proportions [N, K], with rows that sum to 1.
        labels: Labels of the pool [n], in 0..K-1.
        samples: Size per client; None for ``auto``, see the module's docstring.
        cap: The largest automatic size; None for no limit.
        rounding: Function that rounds expected numbers [N, K] and keeps the sums of the rows.

    Returns:
        [N, K] numbers of samples.
    """
    if samples is not None:
        return rounding(samples * proportions)
    available = np.bincount(labels, minlength=proportions.shape[1])
    size = _limit(proportions, available, cap)
    return _first_fit(size, available, lambda size: rounding(size * proportions))


def matching_counts(
    counts: IntArray, labels: IntArray, samples: int | None, cap: int | None, rng: np.random.Generator
) -> IntArray:
    """Return the number of test samples of each class for each client, in the proportions of its training data.

    Args:
        counts: Numbers of training samples [N, K].
        labels: Labels of the test pool [n], in 0..K-1.
        samples: Size per client. None for ``auto``: sizes proportional to those of the training data, at least 1, as
            large as possible without reuse.
        cap: The largest automatic size; None for no limit.
        rng: Source of the choice between equal remainders.

    Returns:
        [N, K] numbers of samples.
    """
    totals = counts.sum(axis=1)
    proportions = available_proportions(counts.astype(np.float64), labels)
    if samples is not None:
        return largest_remainder(proportions, np.full(len(totals), samples), rng)
    available = np.bincount(labels, minlength=counts.shape[1])
    relative = totals / totals.max()
    size = _limit(proportions * relative[:, None], available, cap)

    def demand(size: int) -> IntArray:
        sizes = np.maximum(1, np.floor(np.round(size * relative, _DECIMALS))).astype(np.int64)
        return largest_remainder(proportions, sizes, rng)

    return _first_fit(size, available, demand)


def _limit(weights: FloatArray, available: IntArray, cap: int | None) -> int:
    """Return the largest size with an expected demand that fits the available samples, between 1 and the cap."""
    demand = weights.sum(axis=0)
    needed = demand > 0
    size = int(np.floor(np.round((available[needed] / demand[needed]).min(), _DECIMALS)))
    return max(1, size if cap is None else min(size, cap))


def _first_fit(size: int, available: IntArray, demand: Callable[[int], IntArray]) -> IntArray:
    """Lower the size until a random rounding of its demand [N, K] fits the available samples [K], or the size is 1."""
    while True:
        for _ in range(_ROUNDINGS):
            counts = demand(size)
            if (counts.sum(axis=0) <= available).all():
                return counts
        if size == 1:
            return counts
        size -= 1


def draw_samples(labels: IntArray, demand: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Give every client its number of samples of every class.

    The samples of each class are shuffled into a ring; the clients, in random order, take consecutive pieces of it.

    Args:
        labels: Labels of the pool [n], in 0..K-1.
        demand: Numbers of samples [N, K]; 0 for classes without samples.
        rng: Source of the orders.

    Returns:
        Sorted positions in `labels` for each client.
    """
    num_clients, num_classes = demand.shape
    pieces: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        ring = rng.permutation(np.flatnonzero(labels == label))
        start = 0
        for client in rng.permutation(num_clients):
            stop = start + int(demand[client, label])
            if stop > start:
                pieces[client].append(ring[np.arange(start, stop) % len(ring)])  # wraps around: reuse is even
            start = stop
    return [np.sort(np.concatenate(piece)) for piece in pieces]


def reuse_report(indices: Sequence[IntArray], labels: IntArray, num_classes: int) -> dict[str, Any]:
    """Report how often samples are used.

    Args:
        indices: Positions in `labels` of each client's samples.
        labels: Labels of the pool [n], in 0..K-1.
        num_classes: Number of classes K.

    Returns:
        Plain numbers and lists: ``reused`` (True if any sample is used more than once), ``draws`` (total number of
        samples over all clients), ``distinct`` (number of different samples among them), ``available`` (samples in the
        pool), ``largest_ratio`` (largest draws / available of a class), ``max_uses`` (largest number of uses of one
        sample), and ``per_class`` with lists of draws, available and max_uses.
    """
    uses = np.bincount(np.concatenate(indices), minlength=len(labels))
    draws = np.bincount(labels, weights=uses, minlength=num_classes).astype(np.int64)
    available = np.bincount(labels, minlength=num_classes)
    max_uses = np.zeros(num_classes, dtype=np.int64)
    np.maximum.at(max_uses, labels, uses)
    return {
        "reused": bool(uses.max() > 1),
        "draws": int(draws.sum()),
        "distinct": int(np.count_nonzero(uses)),
        "available": len(labels),
        "largest_ratio": round(float((draws / np.maximum(available, 1)).max()), 4),
        "max_uses": int(uses.max()),
        "per_class": {
            "draws": draws.tolist(),
            "available": available.tolist(),
            "max_uses": max_uses.tolist(),
        },
    }
